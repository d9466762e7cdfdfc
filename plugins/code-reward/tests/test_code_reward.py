"""What counts as right, and that nothing but being right does."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import sys
import tempfile
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from boxes import alive, judged, reward

from miles_code_reward import CodeConfig, _check, miles_rewards, sandbox
from miles_code_reward.cases import tests_of as read_tests
from miles_code_reward.program import program_in, same_output
from miles_code_reward.reward import script
from miles_core import Environment, Prompt
from miles_core.errors import ConfigError
from miles_core.settings import RunConfig
from miles_core.testing.samples import group_of, make_sample

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="boxes are made of Linux namespaces and limits")

PLUS_ONE = {"stdin": [{"input": "1\n", "output": "2\n"}, {"input": "5\n", "output": "6\n"}]}
ADD = ["assert add(1, 2) == 3", "assert add(2, 2) == 4", "assert add(5, 2) == 7", "assert add(0, 0) == 0"]
CALLS = {"function": "add", "calls": [{"args": [1, 2], "expected": 3}, {"args": [2, 2], "expected": 4}]}
HUMAN_EVAL = {
    "test": "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(2, 2) == 4",
    "entry_point": "add",
}
RIGHT = "def add(a, b):\n    return a + b"

SOLUTION = "class Solution:\n    def add(self, a, b):\n        return a + b"


@pytest.fixture(scope="module")
def strict():
    return reward()


@pytest.fixture(scope="module")
def partial():
    return reward(partial=True)


# --- Right and wrong, in every form of test --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("label", "right", "wrong"),
    [
        (PLUS_ONE, "print(int(input()) + 1)", "print(2)"),
        ({"inputs": ["1", "5"], "outputs": ["2", "6"]}, "print(int(input()) + 1)", "print(2)"),
        (ADD, RIGHT, "def add(a, b):\n    return 3"),
        ({"test_list": ADD, "test_setup_code": ""}, RIGHT, "def add(a, b):\n    return a"),
        (HUMAN_EVAL, RIGHT, "def add(a, b):\n    return 3"),
        (CALLS, RIGHT, "def add(a, b):\n    return 3"),
        (json.dumps(CALLS), RIGHT, "def add(a, b):\n    return 3"),
        ({"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]}, SOLUTION, RIGHT + " + 1"),
    ],
    ids=["stdin", "inputs and outputs", "assertions", "test_list", "check(candidate)", "calls", "JSON text", "Solution"],
)  # fmt: skip
def test_every_form_of_test(strict, label, right, wrong):
    assert judged(strict, right, label).value == 1.0
    assert judged(strict, wrong, label).value == 0.0


def test_partial_credit_is_the_fraction_that_passes(partial):
    assert judged(partial, "print(2)", PLUS_ONE).value == 0.5  # 1 of 2
    assert judged(partial, "def add(a, b):\n    return 4 if a == 2 else 3", ADD).value == 0.5  # (1, 2) and (2, 2) of 4


def test_with_partial_credit_a_crash_or_a_hang_costs_its_own_test_only():
    made = reward(partial=True, test_timeout_s=0.5)
    crash = "import os\ndef add(a, b):\n    if a == 2: os._exit(0)\n    return a + b"
    assert judged(made, crash, ADD).value == 0.75
    assert judged(made, crash.replace("os._exit(0)", "\n        while True: pass"), ADD).value == 0.75


def test_tests_that_did_not_get_their_turn_have_not_passed():
    made = reward(partial=True, test_timeout_s=5.0, total_s=1.0)
    start = time.monotonic()
    verdict = judged(made, "import time\ndef add(a, b):\n    time.sleep(0.4)\n    return a + b", ADD * 50)
    assert 0 < verdict.value <= 2 / 200 and time.monotonic() - start < 8  # to start 198 more takes longer


def test_only_the_first_tests_when_told_so():
    assert judged(reward(max_tests=1), "print(2)", PLUS_ONE).value == 1.0


def test_other_languages_run_by_their_command():
    made = reward(command=("/bin/sh", "solve.sh"), file="solve.sh", languages=("sh",))
    sample = make_sample(2, prompt=Prompt(id="p", text="q", label=PLUS_ONE))
    sample.response = "```sh\nread n\necho $((n + 1))\n```"
    assert made.score(sample).value == 1.0


# --- What tests may do with a program --------------------------------------------------------------------------------

PROGRAM = """
class Stack:
    def __init__(self): self.items = []
    def push(self, x): self.items.append(x)
    def pop(self): return self.items.pop()
    def __len__(self): return len(self.items)
    def __eq__(self, other): return self.items == other.items
def apply(f, xs): return [f(x) for x in xs]
def sort(xs): xs.sort()
def count(n):
    while True:
        yield n
        n += 1
def fail(): raise KeyError("k")
def echo(x): return x
class Odd(Exception): pass
def odd(): raise Odd("strange")
"""
USES = [
    "x = [1, (2, 3), {4}, {'a': None}, 2.5, b'x', 2 ** 70, True]\nassert echo(x) == x and echo(x) is not x",
    "assert type(echo((1,))) is tuple and type(echo([1])) is list and type(echo(frozenset())) is frozenset",
    "assert echo(float('inf')) == float('inf') and echo(float('nan')) != echo(1)",
    "s = Stack()\ns.push(1)\ns.push((1, 2))\nassert len(s) == 2 and s.pop() == (1, 2) and s.items == [1]",
    "a, b = Stack(), Stack()\nassert a == b\na.push(1)\nassert a != b and a == a",
    "assert apply(lambda x: x + 1, [1, 2]) == [2, 3]",
    "xs = [3, 1, 2]\nsort(xs)\nassert xs == [1, 2, 3]",
    "g = count(5)\nassert next(g) == 5 and next(g) == 6",
    "try:\n    fail()\nexcept KeyError:\n    pass\nelse:\n    assert False",
    "try:\n    odd()\nexcept Exception as error:\n    assert 'Odd: strange' in str(error)",
    "assert math.isclose(echo(1 / 3), 0.333333333, rel_tol=1e-6)",
    "assert sorted(echo([2, 1])) == [1, 2] and abs(echo(-2) + 1) < 1.1",
    "assert helper(echo(2)) == 4",
]  # fmt: skip


def test_tests_are_python(partial):
    """All in one run: the first that fails is the reason."""
    verdict = judged(partial, PROGRAM, {"assertions": USES, "setup": "def helper(x):\n    return 2 * x"})
    assert verdict.value == 1.0, verdict


@pytest.mark.parametrize(
    ("value", "expected", "right"),
    [
        ("(1, [2])", [1, [2]], True),  # JSON has no tuple
        ("{1: 'a'}", {"1": "a"}, True),  # nor a key that is no text
        ("0.1 + 0.2", 0.3, True),  # within 1e-6
        ("0.31", 0.3, False),
        ("3.0", 3, True),
        ("2", 3, False),
        ("True", 1, False),
        ("1", True, False),
        ("None", None, True),
        ("[1, 2]", [1, 2, 3], False),
        ("'1'", 1, False),
        ("{'a': [1]}", {"a": [2]}, False),
        ("10**20", 10**20, True),
        ("10**20 + 1", 10**20, False),
    ],
)
def test_values_are_compared_with_what_json_says(value, expected, right):
    tester: dict = {"__name__": "tester"}
    exec(script("tester"), tester)
    assert tester["same"](eval(value), expected, 1e-6) is right


def test_what_can_be_iterated_is_a_list_where_json_has_one(strict):
    label = {"function": "f", "calls": [{"args": [], "expected": [0, [1, 2]]}]}
    assert judged(strict, "def f():\n    yield 0\n    yield range(1, 3)", label).value == 1.0


# --- Cheating --------------------------------------------------------------------------------------------------------

CHEATS = {
    "sys.exit while loading": "import sys\nsys.exit(0)",
    "os._exit while loading": "import os\nos._exit(0)",
    "sys.exit in the call": "import sys\ndef add(a, b):\n    sys.exit(0)",
    "os._exit in the call": "import os\ndef add(a, b):\n    os._exit(0)",
    "exit at the end": "import atexit, os\natexit.register(os._exit, 0)\ndef add(a, b):\n    return 0",
    "an object that equals everything": """
class Any:
    def _yes(self, *_): return True
    def _zero(self, *_): return 0
    __eq__ = __lt__ = __gt__ = __le__ = __ge__ = __contains__ = __bool__ = _yes
    __sub__ = __rsub__ = __add__ = __abs__ = __float__ = __int__ = __index__ = _zero
    __ne__ = lambda self, other: False
    def __hash__(self): return 3
def add(a, b):
    return Any()
""",
    "a number that equals everything": """
class Any(int):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 3
def add(a, b):
    return Any(0)
""",
    "another meaning of builtins": """
import builtins
builtins.AssertionError = type("Quiet", (Exception,), {})
builtins.abs = builtins.len = builtins.all = lambda *_: True
builtins.__build_class__ = None
def all(*_): return True
def sorted(*_): return 3
def add(a, b):
    return 0
""",
    "another meaning of the harness": """
import json, os, sys
main = sys.modules["__main__"]
json.dumps = lambda *_, **__: '["ok", true, []]'
for name in dir(main):
    if not name.startswith("__") and name not in ("os", "json", "sys"):
        setattr(main, name, lambda *_, **__: True)
def add(a, b):
    return True
""",
    "verdicts on every descriptor": """
import os
def add(a, b):
    for fd in range(64):
        for text in ('["ok", true, []]', "passed 0", "end", '["answer", 3]'):
            try: os.write(fd, (text + "\\n").encode())
            except OSError: pass
    return True
""",
    "no protocol": "import os\nos.write(4, b'hello\\n' * 10)\ndef add(a, b):\n    return a + b",
    "answers that nest too deeply": "import os\nos.write(4, b'[' * 100000 + b'\\n')\ndef add(a, b):\n    return a + b",
    "an answer without end": "import os\nwhile True: os.write(4, b'x' * 65536)",
    "asking back what it was not given": """
import os
os.write(4, b'["ok", null, []]\\n' + b'["ask", 0, ["list"]]\\n["ask", -1, ["list"]]\\n' * 3)
def add(a, b):
    return 0
""",
    "changing what it was not given": """
import os
def add(a, b):
    os.write(4, b'["ok", 0, [[0, 3]]]\\n')
    return 0
""",
    "searching its process for what is expected": """
import gc, glob, os, re, sys
def texts():
    for path in [path for pattern in ("/*", "*", "/proc/*/cmdline", "/proc/*/environ") for path in glob.glob(pattern)]:
        try:
            with open(path, "rb") as file: yield file.read(1 << 16).decode("latin-1")
        except OSError: pass
    for x in gc.get_objects():
        try: yield repr(x)
        except BaseException: pass
    frame = sys._getframe()
    while frame:
        yield repr(frame.f_locals)
        frame = frame.f_back
def add(a, b):
    for text in texts():
        found = re.search("4242[0-9]+", text)
        if found: return int(found[0])
    return 0
""",
}  # fmt: skip


@pytest.mark.parametrize("how", CHEATS)
def test_no_cheat_passes_assertions(strict, how):
    tests = ["assert add(1, 2) == 3", "assert abs(add(2, 2) - 4) < 1e-9", "assert add(5, 2) in (7,)"]
    tests = ["assert add(0, 0) == 4242000017"] if "searching" in how else tests
    verdict = judged(strict, CHEATS[how], tests)
    assert verdict.value == 0.0 and verdict.parts["passed"] == 0.0 and verdict.reason


@pytest.mark.parametrize("how", CHEATS)
def test_no_cheat_passes_calls(strict, how):
    expected = 4242000017 if "searching" in how else 3
    label = {"function": "add", "calls": [{"args": [1, 2], "expected": expected}]}
    assert judged(strict, CHEATS[how], label).value == 0.0


def test_leaving_early_is_no_success_where_output_is_compared(strict):
    for program in ("import sys; sys.exit(0)", "import os; os._exit(0)", "pass"):
        assert judged(strict, program, PLUS_ONE).value == 0.0


def test_the_right_output_of_a_program_that_fails_is_wrong(strict):
    verdict = judged(strict, "print(int(input()) + 1, flush=True)\nraise SystemExit(3)", PLUS_ONE)
    assert (verdict.value, verdict.reason) == (0.0, "exit code 3")


def test_a_reason_says_what_happened(strict):
    reasons = {
        "import os\ndef add(a, b):\n    os._exit(0)": "the program is gone",
        "import os\nwhile True: os.write(4, b'x' * 65536)": "while loading: the program ended",
        "def add(a, b):\n    return 9": "assertion failed",
        "def add(a, b):\n    return 1 / 0": "ZeroDivisionError: division by zero",
        "1 +": "while loading: SyntaxError: invalid syntax",
        "def sub(a, b):\n    return 0": "NameError: name 'add' is not defined",
    }
    for program, reason in reasons.items():
        assert judged(strict, program, ADD).reason.startswith(reason), program


def test_a_test_that_leaves_early_is_no_success(strict):
    """Only the tester's own last line, with the token of this run, ends a test."""
    verdict = judged(strict, RIGHT, ["import os\nos._exit(0)"])
    assert (verdict.value, verdict.reason.partition(" (")[0]) == (0.0, "the tests ended without their token")
    everywhere = "for fd in range(64):\n    try: os.write(fd, b'\\n00 passed 0\\n00 end\\n')\n    except OSError: pass"
    assert judged(strict, RIGHT, [f"import os\n{everywhere}\nos._exit(0)"]).value == 0.0
    assert judged(strict, RIGHT, ["print('passed 0')\nprint('end', flush=True)\nimport os\nos._exit(0)"]).value == 0.0
    assert judged(strict, RIGHT, ["raise SystemExit(0)"]).value == 0.0


def test_what_an_object_contains_is_what_it_iterates_over(strict):
    cheat = (
        "class Any:\n    __contains__ = lambda *_: True\n    __iter__ = lambda self: iter([4])\ndef f():\n    return Any()"
    )
    assert judged(strict, cheat, ["assert 3 in f()"]).value == 0.0
    assert judged(strict, cheat, ["assert 4 in f()"]).value == 1.0


def test_a_name_of_the_standard_library_is_not_the_programs(strict):
    cheat = "class math:\n    isclose = staticmethod(lambda *_: True)\ndef f():\n    return 0"
    assert judged(strict, cheat, ["assert math.isclose(f(), 2)"]).value == 0.0


# --- Where the program stands ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("```python\nx\n```", "x"),
        ("```py\nx\n```\n```python\ny\n```", "y"),
        ("```python\nx\n```\nprints\n```\noutput\n```", "x"),  # a named block before one without a name
        ("```\nx\n```", "x"),
        ("```cpp\nx\n```", None),
        ("```python\nx\n```\n```text\ny\n```", "x"),
        ("```python\nx\n```\n```python\ncut off", "x"),
        ("```python\ncut off", None),
        ("<think>```python\nx\n```</think> I give up", None),
        ("<think>```python\nx\n```</think>\n```python\ny\n```", "y"),
        ("<think>\n```python\nx\n```", None),
        ("```python\nx\n```<|im_end|>\n```python\ny\n```", "x"),  # what follows the end of the turn does not count
        ("no fence", None),
        ("", None),
    ],
)
def test_R8_where_the_program_stands(response, program):
    assert program_in(response, ("python", "py"), True) == program


def test_without_fences_a_response_is_a_program_when_allowed():
    assert program_in("print(1)", ("python",), False) == "print(1)"
    assert program_in("```cpp\nx\n```", ("python",), False) is None
    assert program_in("  \n", ("python",), False) is None


@pytest.mark.parametrize(
    ("got", "expected", "how", "right"),
    [
        ("1 \n2\n\n", "1\n2", "lines", True),
        ("1\r\n2", "1\n2", "lines", True),
        ("1 2", "1\n2", "lines", False),
        ("1 2", "1\n2", "tokens", True),
        ("0.3333333", "0.33333331", "tokens", True),
        ("0.33", "0.3333", "tokens", False),
        ("1 2 3", "1 2", "tokens", False),
        ("nan", "1", "tokens", False),
        ("1\n", "1", "exact", False),
        ("", "", "lines", True),
    ],
)
def test_output_is_compared(got, expected, how, right):
    assert same_output(got, expected, how, 1e-6) is right


@pytest.mark.parametrize(
    ("label", "message"),
    [
        (None, "needs tests as the label"),
        ("print", "is not JSON"),
        ({}, "holds no test"),
        ([], "holds no test"),
        (["assert ("], "is no Python"),
        ({"calls": [{"args": [], "expected": 1}]}, 'needs "function"'),
        ({"function": "f", "calls": [{"args": [1]}]}, 'lacks "expected"'),
        ({"inputs": ["1"], "outputs": []}, "1 inputs and 0 outputs"),
    ],
)
def test_a_label_without_tests_is_an_error_and_not_a_zero(label, message):
    with pytest.raises(ValueError, match=message):
        read_tests(label)


def test_names_of_tests_are_those_that_they_do_not_define():
    label = {
        "assertions": ["import os.path as p\nx = f(g)\nassert all(p.exists(y) for y in x)", "def h(z): return z + K\nh(1)"]
    }
    assert read_tests(label).names == ("K", "f", "g")


# --- In a run --------------------------------------------------------------------------------------------------------


def test_verdict_and_metrics(strict):
    strict.context.metrics.clear()
    verdict = judged(strict, "print(2)", PLUS_ONE)
    assert verdict.parts == {"passed": 0.5, "program": 1.0} and verdict.reason.startswith("wrong output")
    names = {"isolated", "program_found", "passed", "seconds"}
    assert set(strict.context.metrics) == {f"reward/code/{name}" for name in names}
    isolated = strict.sandbox.mode != "plain"
    assert strict.context.metrics["reward/code/isolated"] == (float(isolated), 1.0, "mean")
    assert ("not isolated from the network" in verdict.reason) != isolated


def test_total_time_must_leave_room_for_a_verdict():
    tables = {name: {"use": "toy"} for name in ("tokenizer", "data", "engine", "trainer")}
    run = {**tables, "steps": 1, "rollout": {"groups_per_step": 1, "samples_per_group": 2}, "loss": ({"use": "x"},)}
    config = RunConfig.model_validate({**run, "reward": ({"use": "code", "timeout_s": 5.0},)})
    with pytest.raises(ConfigError, match=r"total_s = 8 leaves no time for a verdict before the table's timeout_s = 5"):
        _check(CodeConfig(), Environment(where="run.toml: reward[0]", run_config=config))
    _check(CodeConfig(total_s=4.0), Environment(run_config=config))


def test_R5_a_worker_that_is_killed_takes_its_boxes_along():
    """The table's limit comes before the reward's own: the worker dies in the middle of a program."""
    from miles_core.scoring import Scorer
    from miles_core.settings import RewardTable

    mark = f"left{secrets.token_hex(4)}"
    (component,) = miles_rewards()
    table = RewardTable(use="code", timeout_s=1.5)
    options = CodeConfig(test_timeout_s=60.0, total_s=60.0)
    prompt = Prompt(id="p", text="q", label=PLUS_ONE)
    samples = [make_sample(2, index=i, prompt=prompt, reward=None) for i in range(2)]
    hang = f"import os, sys\nos.execv(sys.executable, ['p', '-S', '-c', 'while True: pass  # {mark}'])"
    samples[0].response = f"```python\n{hang}\n```"
    samples[1].response = "```python\nprint(int(input()) + 1)\n```"
    group = group_of(samples)
    group.prompt = prompt
    scorer = Scorer.from_components([("code", component, options, table)], modules=["miles_code_reward"])

    async def go():
        await scorer.start()
        try:
            await scorer.score_group(group)
        finally:
            await scorer.close()

    asyncio.run(go())
    assert [s.reward for s in samples] == [None, 1.0] and scorer.counters["timeouts"] == 1
    assert alive(mark) == []
    left = [name for name in os.listdir(tempfile.gettempdir()) if name.startswith(sandbox.PREFIX)]
    assert not [name for name in left if not os.path.exists(f"/proc/{name.split('-')[3]}")]
