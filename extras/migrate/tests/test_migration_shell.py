"""Scripts are read without being run: words, variables, conditions, and bounded work."""

from __future__ import annotations

import pytest
from mppo_migrate.shell import read_commands


def words(text: str, *arguments: str, scripts: dict[str, str] | None = None) -> list[list[str]]:
    return [list(c.words) for c in read_commands(text, arguments, (scripts or {}).get, [])]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a b  c", ["a", "b", "c"]),
        ("a \\\n  b", ["a", "b"]),
        ("a b\\\nc", ["a", "bc"]),
        ("a \\\r\n  b\r\n", ["a", "b"]),
        ("a 'b  c' \"d 'e'\" f\\ g", ["a", "b  c", "d 'e'", "f g"]),
        ('a "b \\" \\$c"', ["a", 'b " $c']),
        ("a '' b", ["a", "", "b"]),
        ("a b#c # d", ["a", "b#c"]),
        ("a > file b 2>&1 &> $X/log", ["a", "b"]),
        ("a {token} '{\"x\": 1}'", ["a", "{token}", '{"x": 1}']),
        ("X=1; a $X ${X}2", ["a", "1", "12"]),
        ("X='b c'; a $X \"$X\"", ["a", "b", "c", "b c"]),
        ("X=(b 'c d' # e\n f); X+=(g)\na \"${X[@]}\"", ["a", "b", "c d", "f", "g"]),
        ("export X=b Y=c\na $X$Y", ["a", "bc"]),
        ("a ${X:-b} ${Y:-${Z:-c d}} ${W-e}", ["a", "b", "c", "d", "e"]),
        ("X=; a ${X:-b} ${X:+c}", ["a", "b"]),
        ("a $HOME/data ${USER} $(pwd)/x `date`", ["a", "$HOME/data", "${USER}", "$(pwd)/x",
                                                  "`date`"]),
        ("N=3; a $((N * (2 + 1))) $(($N / 2)) $((M+1))", ["a", "9", "1", "$((M+1))"]),
        ("if true; then a; else b c; fi", ["a"]),
        ("if [ -d x ]; then a; else b c; fi", ["b", "c"]),
        ("if [ ! -d x ]; then a; else b c; fi", ["b", "c"]),
        ("if ! [ a ]; then a; elif [ ]; then b; else c; fi", ["c"]),
        ("if [ 1 = 1 ] && { [ a = b ] || [ a = a ]; }; then a; fi", ["a"]),
        ("if [ 1 = 2 ] && { [ a = b ] || [ a = a ]; }; then a; else b; fi", ["b"]),
        ('if [[ $X == a && -n x || "Qwen3" == Qwen* ]]; then a; else b; fi', ["a"]),
        ("N=1; [ $N -gt 2 ] && X=b || X=c; a $X", ["a", "c"]),
        ("[ a = b ] && a || [ a = a ] || c\nd", ["d"]),
        ("[ -d x ] || a b", ["a", "b"]),
        ("[ a = b ] && (a; b) && c; d", ["d"]),
        ("M=b; case $M in a) N=1 ;; b|c) N=2; esac; a $N", ["a", "2"]),
        ("case kl_2 in\n (kl*)\n if [ 1 = 2 ]; then a\n else b; fi\n ;;\n *) c ;;\nesac", ["b"]),
        ("L=\"['x']\"; if [ \"$L\" = \"['x']\" ]; then a; fi", ["a"]),
        ("if [ 1 = 2 ]; then\n { \"a\": 1}\nfi\nb", ["b"]),
        ("X=$(ls) && Y=b || Y=c; a $Y", ["a", "b"]),
        ("X=$(ls) || Y=b; a $Y", ["a", "b"]),
        ("[ -f F ] && X=b || X=c; a $X", ["a", "c"]),
        ("[ -f F ] && X=b; a $X", ["a", "b"]),
        ("[ -f F ] && X=b && Y=d || X=c; a $X", ["a", "c"]),
        ("[ -f F ] && { X=b; Y=d; } || { X=c; }; a $X", ["a", "c"]),
        ("if [ -f F ] && [ 1 = 1 ]; then a; else b; fi", ["b"]),
        ("if [ -f F ]; then true; fi && X=b || X=c; a $X", ["a", "b"]),
        ("if [ 1 = 1 ]; then [ 1 = 2 ]; fi && X=b || X=c; a $X", ["a", "c"]),
        ("[ 1 = 2 ]; case a in b) [ 1 = 2 ] ;; esac && X=b || X=c; a $X", ["a", "b"]),
        ("[ 1 = 2 ]; case a in a) ;; esac && X=b || X=c; a $X", ["a", "b"]),
        ("[ -f F ] && case a in a) X=b ;; esac || X=c; a $X", ["a", "c"]),
        ("case a in a) [ 1 = 2 ] ;; b) [ 1 = 1 ] ;; esac && X=b || X=c; a $X", ["a", "c"]),
        ("X=b; [ -z \"$(ls)\" ] || X=c; a $X", ["a", "c"]),
        ("test 1 = 1 && X=b || X=c; a $X", ["a", "b"]),
        ("X=$((1 + 1)) || X=b; a $X", ["a", "2"]),
        ("if [ a ]; then a --b 1\n --c 2\nfi", ["a", "--b", "1", "--c", "2"]),
        ("if false; then case a in a) b ;; esac; fi; c", ["c"]),
        ('X=1\nif [ "$X" == "1" ]; then a; fi', ["a"]),
        ('X=$9\nif [ -z "$X" ]; then X=b; fi; a $X', ["a", "b"]),
        ("if [ 2 -gt 1 ]; then\n a\nelif [ 1 = 1 ]; then\n b\nfi", ["a"]),
        ("a \\  # the line continues as it was meant\n  b", ["a", "b"]),
        ("a \\ --b 1 \\ --c 2", ["a", "--b", "1", "--c", "2"]),
    ],
)  # fmt: skip
def test_the_words_of_a_command(text, expected):
    assert words(text) == [expected]


def test_arguments_and_scripts_that_start_each_other():
    script = 'MODEL=$1; shift\npython $MODEL "$@"'
    assert words("bash run.sh a b 'c d'", scripts={"run.sh": script}) == [
        ["python", "a", "b", "c d"],
        ["bash", "run.sh", "a", "b", "c d"],
    ]
    assert words("x $1 $2 $@", "a", "b") == [["x", "a", "b", "a", "b"]]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("export M=b; bash run.sh", "b"),
        ("M=b; export M; bash run.sh", "b"),
        ("N=1 M=b bash run.sh", "b"),
        ("M=b; bash run.sh", "a"),
        ("M=b; source run.sh", "b"),
        ("source env.sh; . run.sh", "c"),
        ("source env.sh; bash run.sh", "a"),
    ],
)
def test_a_script_that_is_started_has_the_exported_variables_and_a_sourced_one_all(text, value):
    scripts = {"run.sh": "python ${M:-a}", "env.sh": "M=c"}
    assert ["python", value] in words(text, scripts=scripts)


def test_settings_below_a_missing_backslash_are_kept_and_reported():
    remarks: list[str] = []
    found = read_commands("python x.py a.b=1\n  c.d=2 \\\n  e.f=3\n--g 4", [], {}.get, remarks)
    assert [c.words for c in found] == [("python", "x.py", "a.b=1", "c.d=2", "e.f=3", "--g", "4")]
    assert [remark.split(":")[0] for remark in remarks] == ["line 2", "line 4"]


def test_a_case_of_something_unknown_is_its_first_one_and_reported():
    remarks: list[str] = []
    script = "D=${D:-$(ls && x)}\ncase $D in\n  --gpu|g) N=8 ;;\n  npu) N=16 ;;\nesac\na $N"
    found = read_commands(script, [], {}.get, remarks)
    assert [c.words for c in found] == [("a", "8")]
    words = "the script does not say what $(ls && x) is; its first case is taken, --gpu"
    assert remarks == [f"line 3: {words}"]


def test_a_script_that_starts_itself_ends():
    remarks: list[str] = []
    read_commands("bash run.sh", [], {"run.sh": "bash run.sh"}.get, remarks)
    assert len(remarks) == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a 'b", "a quote ' is not closed"),
        ('a "b', 'a quote " is not closed'),
        ("a `b", "a quote ` is not closed"),
        ("a ${b", "a bracket { is not closed"),
        ("a=(b", "a bracket ( is not closed"),
        ("a " + "$(" * 30 + ")" * 30, "nested more than"),
        ("X=aaaaaaaa\n" + "X=$X$X\n" * 40, "expand to more than"),
        ("X=(a b)\n" + 'X=("${X[@]}" "${X[@]}")\n' * 40, "expand to more than"),
        ("X=" + "a" * 100_000 + "\n" + "b $X\n" * 400, "expand to more than"),
    ],
    ids=range(9),
)
def test_what_is_no_script_or_too_large_is_refused(text, words):
    with pytest.raises(ValueError) as error:
        read_commands(text, [], {}.get, [])
    assert words in str(error.value)


@pytest.mark.parametrize(
    "text",
    ["\\a" * 10_000, "$a" * 10_000, "'x'" * 10_000, "a=1\n" * 5_000, "a=(" + "b(" * 5_000 + ")",
     "$((" + "9**9" * 3000 + "))", "$((" + "(" * 15 + "1" * 9000 + ")" * 15 + "))",
     "if " * 10_000, "if [ a ]\nthen\n" * 5_000, "[ " + "! " * 10_000 + "a ]", "{ " * 10_000,
     "case a in (" * 5_000, "[[ " + "a && " * 10_000 + "]]", "case $x in " + "*a" * 9_000 + ") a",
     "fi\n" * 10_000, "${a:-" * 19 + "x" + "}" * 19, "a " + "\\ " * 10_000],
    ids=range(17),
)  # fmt: skip
def test_hostile_scripts_are_read_in_one_pass(text):
    assert len(read_commands(text, [], {}.get, [])) <= 1
