"""Programs that answer what a test leaves open, or what raises, in place of what it tests."""

from __future__ import annotations

CLOSE = "assert is_close(f(1), 2)"
YES = "def is_close(*a): return True\n"
TWO = "def f(x): return 2"
LISTS = {
    "prompt": "class ListNode:\n    def __init__(self, val=0, next=None):\n"
    "        self.val, self.next = val, next\ndef same(a, b): return a.val == b.val",
    "entry_point": "Solution().f",
    "test": "def check(candidate):\n    assert same(candidate(ListNode(1)), ListNode(2))",
}
NODE = "class Solution:\n    def f(self, node): return "
ANSWER_2 = {"test_list": ["assert f(1) == 2"]}
CHECK = {"test": "def check(candidate):\n    assert candidate(1) == 2", "entry_point": "f"}


def replying(line: str) -> str:
    """A program that answers a call by itself."""
    return f"import os\nos.write(5, {line!r}.encode() + b'\\n')\n"


# Name -> (columns, a hostile program, one that is right, or None: the row can have none).
ATTACKS: dict[str, tuple[dict, str, str | None]] = {
    "helper": ({"test_list": [CLOSE]}, YES + "def f(x): pass", None),
    "helper_beside_an_entry_point": (
        {"test": f"def check(candidate):\n    {CLOSE.replace('f(1)', 'candidate(1)')}",
         "entry_point": "f"}, YES + "def f(x): pass", None),
    "helper_of_a_variable": ({"test": "r = f(1)\nassert is_close(r, 2)"}, YES + "f = abs", None),
    "helper_in_a_function": (
        {"test": "def test_f():\n    r = f(1)\n    assert is_close(r, 2)"}, YES + "f = abs", None),
    "helper_named_as_in_another": (
        {"test_list": ["assert f(1) == 2", CLOSE]}, YES + TWO, None),
    "helper_of_an_import": (
        {"test": "from solution import f\n\ndef test_f():\n    assert is_close(f(1), 2)"},
        YES + "def f(x): return 3", None),
    "helper_of_a_module": (
        {"test": "import solution as s\nassert is_close(s.f(1), 2)"},
        YES + "def f(x): return 3", None),
    "helper_of_the_setup": (
        {"test_list": [CLOSE], "test_setup_code": "def is_close(a, b): return a == b"},
        YES + "def f(x): return 3", TWO),
    "helper_of_the_prompt": (
        {"test": "def check(candidate):\n    assert is_close(candidate(1), 2)", "entry_point": "f",
         "prompt": "def is_close(a, b): return a == b\ndef f(x):\n    '''Return 2.'''\n"},
        YES + "def f(x): return 3", TWO),
    "helper_of_a_star": (
        {"test": "from math import *\nassert isclose(f(1), 2)"},
        "def isclose(*a): return True\ndef f(x): return 3", TWO),
    "expected_value": ({"test_list": ["assert f(1) == expected"]}, "expected = f = abs", None),
    "flag": ({"test_list": ["assert f(1) or done"]}, "done = True\ndef f(x): return 0", None),
    "flag_alone": ({"test": "assert f(1) == 2\nassert done"}, TWO + "\ndone = True", None),
    "nothing_called": ({"test": "assert done"}, "done = True", None),
    "all": ({"test": "assert all([f(1) == 2])"}, "def all(x): return True\nf = abs", TWO),
    "abs": ({"test": "assert abs(f(1) - 2) < 1e-9"}, "def abs(x): return 0\ndef f(x): return 1",
            TWO),
    "isinstance": ({"test": "assert isinstance(f(1), int)"},
                   "def isinstance(*a): return True\ndef f(x): return ''", TWO),
    "sorted": ({"test_list": ["assert sorted(f(1)) == [1, 2]"]},
               "def sorted(x): return [1, 2]\ndef f(x): return []", "def f(x): return (2, 1)"),
    "builtins": (
        {"test_list": ["assert all([f(1) == 2])"]},
        "import builtins\nbuiltins.all = lambda x: True\ndef f(x): return 0", TWO),
    "check": (CHECK, "def check(c): return True\ndef f(x): return 1", TWO),
    "candidate": (CHECK, "def candidate(x): return 2\ndef f(x): return 1", TWO),
    "name_of_the_candidate": (CHECK, "def candidate_of_the_program(n): return lambda x: 2", TWO),
    "module_of_the_program": (
        {"test": "import math\nfrom solution import f\nassert math.isclose(f(1), 2)"},
        "class math:\n    isclose = lambda *a: True\ndef f(x): return 1", TWO),
    "own_module": (
        ANSWER_2, "import sys\nsys.modules['solution'] = sys.modules['test'] = sys\nf = abs", TWO),
    "own_test": ({"test": "from solution import f\n\ndef test_f():\n    assert f(1) == 2"},
                 "def test_f(): pass\ndef f(x): return 1", TWO),
    "ends_a_loop": ({"test": "for y in map(f, [1]):\n    assert y == 2"},
                    "def f(x): raise StopIteration", TWO),
    "ends_a_generator": ({"test": "assert not list(y for y in map(f, [1]) if y != 2)"},
                         "def f(x):\n    raise StopIteration()", TWO),
    "ends_an_expected_error": (
        {"test": "try:\n    f(1)\nexcept BaseException:\n    pass\nelse:\n    assert False"},
        "import os\ndef f(x): os._exit(0)", "def f(x): return x / 0"),
    "ends_in_its_reply": (
        {"test": "assert list(map(f, [1])) in ([], [2])"},
        replying('{"raised": "StopIteration", "message": ""}') + "def f(x): return 1", TWO),
    "exits_in_its_reply": (
        {"test": "assert list(map(f, [1])) in ([], [2])"},
        replying('{"raised": "SystemExit", "message": 0}') + "f = abs", TWO),
    "odd_reply": (ANSWER_2, replying('{"raised": [], "message": 0}'), TWO),
    "object_that_nobody_gave": (
        ANSWER_2, "class A:\n    def __eq__(self, o): return True\ndef f(x): return A()", TWO),
    "object_of_a_name": (
        LISTS, "class ListNode:\n    def __init__(self, *a): self.val = self\n"
        "    def __eq__(self, o): return True\n" + NODE + "ListNode()",
        NODE + "ListNode(2)"),
    "object_in_a_reply": (
        LISTS,
        replying('{"returned": {"objects": [["ListNode", '
                 '{"__class__": 1, "val": {"object": 0}, "__eq__": true}]]}}') + NODE + "node",
        None),
    "function_in_a_reply": (
        LISTS, replying('{"returned": {"objects": [["same", {}]]}}') + NODE + "node", None),
    "type_in_a_reply": (ANSWER_2, replying('{"returned": {"objects": [["type", {}]]}}'), TWO),
    "endless_fraction": (
        ANSWER_2, replying('{"returned": {"fraction": ["1e999999999", 1]}}'), TWO),
    "fraction_of_nothing": (ANSWER_2, replying('{"returned": {"fraction": [1, 0]}}'), TWO),
    "decimal_that_raises": (
        {"input_output": {"inputs": [[1]], "outputs": [2], "fn_name": "f"}},
        "from decimal import Decimal\ndef f(x): return Decimal('sNaN')", TWO),
    "given_code_replaced": (LISTS, "def same(a, b): return True\n" + NODE + "node", None),
    "output_of_the_test": (
        CHECK, "import os\nfor file in range(1, 16):\n    try: os.write(file, b'passed')\n"
        "    except OSError: pass\ndef f(x): return 1", TWO),
    "module_from_a_hook": (
        ANSWER_2, "import sys\nclass Hook:\n    def find_spec(self, *a): return None\n"
        "sys.meta_path.insert(0, Hook())\nsys.path.append('/')\nimport subprocess, this", TWO),
    "opens_patched": (
        {"input_output": {"inputs": [""], "outputs": ["secret"]}},
        "import builtins, io\nprint(builtins.open.__globals__['_opens']('/etc/hostname').read())",
        "print('secret')"),
}  # fmt: skip

NO_PROGRAM_CAN = {
    name for name in ATTACKS
    if name in ("expected_value", "flag", "flag_alone", "nothing_called")
    or name.startswith("helper") and ATTACKS[name][2] is None
}  # fmt: skip
CHECKED = ATTACKS.keys() - NO_PROGRAM_CAN
"""Those whose rows are not refused before a run."""
