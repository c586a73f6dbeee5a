import pytest

from rl_memory_plugins.unified_diff import DiffError, apply_hunks, parse_diff

HEADER = b"--- a/p/x.py\n+++ b/p/x.py\n"
INSERT = HEADER + b"@@ -1,2 +1,3 @@\n one\n+new\n two\n"


def patched(diff, text):
    (file,) = parse_diff(diff)
    return apply_hunks(text, file.hunks)


def test_a_hunk_is_found_by_its_lines_not_by_its_number():
    assert patched(INSERT, b"zero\nzero\none\ntwo\n") == b"zero\nzero\none\nnew\ntwo\n"


def test_lines_are_removed_and_replaced_in_several_hunks():
    diff = HEADER + b"@@ -1,2 +1,2 @@\n a\n-b\n+B\n@@ -4,2 +4,1 @@\n d\n-e\n"
    assert patched(diff, b"a\nb\nc\nd\ne\nf\n") == b"a\nB\nc\nd\nf\n"


def test_line_endings_count():
    with pytest.raises(DiffError, match="0 places"):
        patched(INSERT, b"one\r\ntwo\r\n")


def test_white_space_counts():
    with pytest.raises(DiffError, match="0 places"):
        patched(INSERT, b"one \ntwo\n")


def test_only_whole_lines_match():
    with pytest.raises(DiffError, match="0 places"):
        patched(INSERT, b"someone\ntwo\n")


def test_two_places_are_refused():
    with pytest.raises(DiffError, match="2 places"):
        patched(INSERT, b"one\ntwo\none\ntwo\n")


def test_overlapping_places_are_counted():
    diff = HEADER + b"@@ -1,2 +1,3 @@\n x\n x\n+y\n"
    with pytest.raises(DiffError, match="2 places"):
        patched(diff, b"x\nx\nx\n")


def test_hunks_keep_their_order():
    diff = HEADER + b"@@ -1,1 +1,2 @@\n b\n+B\n@@ -2,1 +3,2 @@\n a\n+A\n"
    with pytest.raises(DiffError, match="before the end of hunk 1"):
        patched(diff, b"a\nb\n")


@pytest.mark.parametrize(
    "diff",
    [
        b"",
        HEADER,
        b"@@ -1,1 +1,2 @@\n a\n+b\n",
        HEADER + b"@@ -1,1 +1,3 @@\n a\n+b\n",  # the header announces one line more
        HEADER + b"@@ -1,1 +1,1 @@\n a\n+b\n",  # ... and one less
        HEADER + b"@@ -0,0 +1,1 @@\n+a\n",  # nothing says where
        HEADER + b"@@ -1,1 +1,2 @@\n a\n+b\n\\ No newline at end of file\n",
        INSERT.replace(b"b/p/x.py", b"b/p/y.py"),
        INSERT.replace(b"a/p/x.py", b"/dev/null"),
        INSERT.replace(b"p/x.py", b"../x.py"),
        INSERT.replace(b"a/p/x.py", b"/p/x.py").replace(b"b/p/x.py", b"/p/x.py"),
    ],
)
def test_malformed_diffs_are_refused(diff):
    with pytest.raises(DiffError):
        parse_diff(diff)
