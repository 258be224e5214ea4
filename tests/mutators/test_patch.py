"""Edits: what applies, what is refused and with which words; the frame is never touched."""

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evotune.errors import PatchError
from evotune.mutators.patch import Edit, apply, knob_line, parse, summary
from evotune.search_space.branch import frame, stages

SOURCE = """\
#include <math.h>
// EVOLVE-BEGIN square
static float square(float x) {
    float y = x;
    return y * x;
}
// EVOLVE-END square
float frame(float x) { return square(x); }
    # EVOLVE-BEGIN cube
    def cube(x):
        y = x * x
        return y * x
    # EVOLVE-END cube
"""


def block(search: str, replacement: str, stage: str = "") -> str:
    replacement = replacement + "\n" if replacement else ""
    return f"<<<<<<< SEARCH {stage}\n{search}\n=======\n{replacement}>>>>>>> REPLACE\n"


def edited(answer: str) -> str:
    return apply(SOURCE, parse(answer))


def test_an_edit_replaces_whole_lines_of_one_stage() -> None:
    result = edited(
        "I square directly.\n\n" + block("    float y = x;\n    return y * x;", "    return x * x;")
    )
    assert stages(result)["square"] == "static float square(float x) {\n    return x * x;\n}\n"
    assert stages(result)["cube"] == stages(SOURCE)["cube"]
    assert frame(result) == frame(SOURCE)


def test_several_edits_apply_in_order() -> None:
    result = edited(
        block("    float y = x;", "    float z = x;")
        + "prose\n"
        + block("    float z = x;", "    float w = x;")
    )
    assert "float w = x;" in result


@pytest.mark.parametrize("fence", ["```c\n{}```\n", "~~~\n{}~~~\n"])
def test_fences_around_blocks_and_around_parts_are_ignored(fence: str) -> None:
    outside = fence.format(block("    float y = x;", "    float z = x;"))
    inside = block("```c\n    float y = x;\n```", "```\n    float z = x;\n```")
    assert edited(outside) == edited(inside) == SOURCE.replace("float y = x", "float z = x")


def test_carriage_returns_are_ignored() -> None:
    assert "\r" not in edited(block("    float y = x;", "    float z = x;").replace("\n", "\r\n"))


def test_a_named_stage_settles_an_ambiguity() -> None:
    twice = SOURCE.replace("y = x * x\n", "float y = x;\n")
    answer = block("float y = x;", "float y = 2;", "cube")
    assert "        float y = 2;" in stages(apply(twice, parse(answer)))["cube"]


def test_an_empty_search_replaces_the_named_stage() -> None:
    result = edited("<<<<<<< SEARCH cube\n=======\n    cube = lambda x: x * x * x\n>>>>>>> REPLACE")
    assert stages(result)["cube"] == "    cube = lambda x: x * x * x\n"


def test_an_empty_replacement_deletes() -> None:
    assert "float y" not in edited(block("    float y = x;", ""))


def test_white_space_may_differ_where_only_one_place_fits() -> None:
    result = edited(block("def cube(x):\n    y = x  *  x", "def cube(x):\n    y = x ** 2"))
    assert "    def cube(x):\n        y = x ** 2\n        return y * x\n" in result


def test_uneven_indentation_is_not_guessed() -> None:
    with pytest.raises(PatchError, match="indented otherwise"):
        edited(block("def cube(x):\n y = x * x", "def cube(x):\n y = x ** 2"))


def test_a_replacement_left_of_its_search_text_is_refused() -> None:
    with pytest.raises(PatchError, match="indented less"):
        edited(block("            y = x * x", "  y = x ** 2"))


REFUSED = {
    "prose": ("I would unroll the loop.", "no edit"),
    "no divider": ("<<<<<<< SEARCH\n    float y = x;\n>>>>>>> REPLACE", "edit 1 is incomplete: a line of ="),
    "no end": ("<<<<<<< SEARCH\n    float y = x;\n=======\n    float z", "edit 1 is incomplete: a line '>>>"),
    "second divider": ("<<<<<<< SEARCH\na\n=======\nb\n=======\nc\n>>>>>>> REPLACE", "incomplete"),
    "second edit cut": (block("    float y = x;", "") + "<<<<<<< SEARCH\n    return", "edit 2 is incomplete"),
    "frame": (block("#include <math.h>", "#include <stdio.h>"), "in the source but not inside any"),
    "across a marker": (block("}\n// EVOLVE-END square", "}"), "in the source but not inside any"),
    "other stage": (block("    float y = x;", "", "cube"), "in the source but not inside stage cube"),
    "marker": (block("    float y = x;", "// EVOLVE-END square"), "markers"),
    "unknown stage": (
        block("    float y = x;", "", "sqare"),
        "no stage named sqare; there are: square, cube",
    ),
    "nameless empty search": (block("", "x"), "needs the name"),
    "no change": (block("    float y = x;", "    float y = x;"), "change nothing"),
    "huge": ("x" * 300_000, "300000 characters"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_say_what_is_wrong(name: str) -> None:
    answer, words = REFUSED[name]
    with pytest.raises(PatchError, match=words):
        edited(answer)


def test_two_places_are_named() -> None:
    twice = SOURCE.replace("    return y * x;", "    float y = x;")
    with pytest.raises(PatchError, match=r"occurs 2 times \(stage square line 2, stage square line 3\)"):
        apply(twice, parse(block("    float y = x;", "")))


def test_text_that_is_nowhere_gets_the_nearest_line() -> None:
    with pytest.raises(
        PatchError, match="stage square line 3, which reads 'return y . x;', not 'return y . y;'"
    ):
        edited(block("    float y = x;\n    return y * y;", "x"))


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("\n**Fuse** the loops\nmore\n" + block("a", "b"), "Fuse** the loops"),
        ("NOTE: fuse\x1b[31m the\tloops\n", "fuse [31m the loops"),
        (block("a", "b") + "afterwards", ""),
        ("```\n" + block("a", "b"), ""),
        ("KNOBS: a=b\n\nFuse.\n", "Fuse."),
        ("w" * 500, "w" * 160),
    ],
)
def test_the_summary_is_one_printable_line(answer: str, expected: str) -> None:
    assert summary(answer) == expected


# Few letters and much white space, so that drawn sources and edits often meet.
line = st.text(alphabet="ab {", max_size=6)
body = st.lists(line, min_size=1, max_size=6)


def source_of(bodies: list[list[str]]) -> str:
    parts = ["frame"]
    for i, lines in enumerate(bodies):
        parts += [f"// EVOLVE-BEGIN s{i}", *lines, f"// EVOLVE-END s{i}", f"between {i}"]
    return "\n".join(parts) + "\n"


@given(st.lists(body, min_size=1, max_size=3), st.data())
def test_any_window_that_is_unique_can_be_edited_and_edited_back(
    bodies: list[list[str]], data: st.DataObject
) -> None:
    source = source_of(bodies)
    stage = data.draw(st.integers(0, len(bodies) - 1))
    begin = data.draw(st.integers(0, len(bodies[stage]) - 1))
    end = data.draw(st.integers(begin + 1, len(bodies[stage])))
    window = tuple(bodies[stage][begin:end])
    new = ("NEW", "  LINES")
    edit = Edit(window, new, f"s{stage}")
    solid = any(text.strip() for text in window)  # a blank search part means the whole stage
    size = len(window)
    if solid and sum(tuple(bodies[stage][i : i + size]) == window for i in range(len(bodies[stage]))) > 1:
        with pytest.raises(PatchError, match="occurs"):
            apply(source, [edit])
        return
    result = apply(source, [edit])
    assert frame(result) == frame(source)
    if solid:
        assert stages(result)[f"s{stage}"].split("\n")[begin : begin + 2] == list(new)
        assert apply(result, [Edit(new, window)]) == source


@given(st.lists(body, min_size=1, max_size=3), st.lists(st.tuples(body, body), min_size=1, max_size=3))
def test_whatever_applies_leaves_the_frame_alone(
    bodies: list[list[str]], pairs: list[tuple[list[str], list[str]]]
) -> None:
    source = source_of(bodies)
    try:
        result = apply(source, [Edit(tuple(search), tuple(new)) for search, new in pairs])
    except PatchError:
        return
    assert result != source
    assert frame(result) == frame(source)
    assert list(stages(result)) == list(stages(source))


@given(st.text(alphabet="<>=SEARCHREPLACE \n`~x" + string.digits, max_size=300))
def test_any_text_is_parsed_or_refused(answer: str) -> None:
    try:
        edits = parse(answer)
    except PatchError:
        return
    assert edits


@given(st.lists(st.tuples(body, body), min_size=1, max_size=4))
def test_parse_reads_back_what_was_written(pairs: list[tuple[list[str], list[str]]]) -> None:
    answer = "".join(block("\n".join(search), "\n".join(new)) for search, new in pairs)
    expected = [tuple(new) if "\n".join(new) else () for _, new in pairs]
    assert [edit.replacement for edit in parse(answer)] == expected
    assert [edit.search for edit in parse(answer)] == [tuple(search) for search, _ in pairs]


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("A change.\nKNOBS: mode=fused, unroll=2\n" + block("a", "b"), {"mode": "fused", "unroll": "2"}),
        ("**KNOBS: mode=fused**\n", {"mode": "fused"}),
        (block("a", "KNOBS: mode=fused"), {}),
        ("no line\n", {}),
    ],
)
def test_the_knob_line_is_read_outside_the_edits(answer: str, expected: dict[str, str]) -> None:
    assert knob_line(answer) == expected


def test_a_knob_line_that_is_not_name_and_value_is_refused() -> None:
    with pytest.raises(PatchError, match="'fast', which is not name=value"):
        knob_line("KNOBS: fast\n")
