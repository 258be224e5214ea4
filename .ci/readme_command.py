"""Print the fenced shell command that follows `<!-- command: NAME -->` in README.md."""

import re
import sys
from pathlib import Path

name = sys.argv[1]
readme = (Path(__file__).resolve().parents[1] / "README.md").read_text()
match = re.search(rf"<!-- command: {re.escape(name)} -->\s*```\w*\n(.*?)```", readme, re.DOTALL)
if match is None:
    sys.exit(f"README.md has no command marked {name}")
print(match[1].strip())
