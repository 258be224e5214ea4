"""Fail when a test was skipped that this machine should have run: only GPU tests and full corpora may be."""

import sys
import xml.etree.ElementTree as ET

ALLOWED = (
    "needs a CUDA device",
    "needs two CUDA devices",
    "full form: run with --full",
    "measured spaces are not at hand",
    "needs clang",  # a second compiler; gcc's form of the same tests is required
    "root may write everywhere",
)

suite = ET.parse(sys.argv[1]).getroot()
cases = list(suite.iter("testcase"))
skipped = [
    (f"{case.get('classname')}::{case.get('name')}", node.get("message") or "")
    for case in cases
    for node in case.iter("skipped")
]
bad = [f"{test}: {reason}" for test, reason in skipped if not any(text in reason for text in ALLOWED)]
print(f"{len(cases)} tests, {len(skipped)} skipped, {len(bad)} of them not allowed to be")
if bad or not cases:
    sys.exit("\n".join(bad) or "no test ran")
