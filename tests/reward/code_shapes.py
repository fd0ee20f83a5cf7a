# ruff: noqa: E501
"""Rows as published data sets have them, each with programs that are right and that are wrong."""

from __future__ import annotations

import base64
import json
import pickle
import zlib

SOLUTION = "class Solution:\n    def f(self, nums: List[int], k: int) -> List[int]:\n        "
HUMANEVAL_PROMPT = '''from typing import List


def has_close(numbers: List[float], threshold: float) -> bool:
    """ Check if any two numbers are closer than the threshold.
    >>> has_close([1.0, 2.0], 0.5)
    False
    """
'''
HUMANEVAL_TEST = """

METADATA = {'author': 'jt', 'dataset': 'test'}


def check(candidate):
    assert candidate([1.0, 2.0, 3.9, 4.0, 5.0, 2.2], 0.3) == True
    assert candidate([1.0, 2.0, 5.9, 4.0, 5.0], 0.95) == True
    assert candidate([1.0, 2.0, 5.9, 4.0, 5.0], 0.8) == False
"""
CYCLIC_PROMPT = '''

def encode_cyclic(s: str):
    """
    returns encoded string by cycling groups of three characters.
    """
    groups = [s[(3 * i):min((3 * i + 3), len(s))] for i in range((len(s) + 2) // 3)]
    groups = [(group[1:] + group[0]) if len(group) == 3 else group for group in groups]
    return "".join(groups)


def decode_cyclic(s: str):
    """
    takes as input string encoded with encode_cyclic function. Returns decoded string.
    """
'''
CYCLIC_TEST = """
def check(candidate):
    for text in ("abcdefgh", "axdhh", ""):
        assert candidate(encode_cyclic(text)) == text
"""
CLOSE = """
def has_close(numbers: List[float], threshold: float) -> bool:
    return any(abs(a - b) < threshold for i, a in enumerate(numbers) for b in numbers[:i])"""
HUMANEVAL_PLUS_TEST = """
import numpy as np

def is_floats(x) -> bool:
    if isinstance(x, float):
        return True
    if isinstance(x, (list, tuple)):
        return all(isinstance(i, float) for i in x)
    return False

def assertion(out, exp, atol):
    if atol == 0 and is_floats(exp):
        atol = 1e-6
    if out != exp and atol != 0:
        np.testing.assert_allclose(out, exp, rtol=1e-07, atol=atol)
    else:
        assert out == exp, f"out: {out}, exp: {exp}"
"""
LEETCODE_PROMPT = """import random
import functools
import collections
from typing import *
from collections import *

inf = float('inf')

class ListNode:
    def __init__(self, val=0, next=None):
        self.val = val
        self.next = next

def list_node(values: list):
    if not values:
        return None
    head = ListNode(values[0])
    p = head
    for val in values[1:]:
        node = ListNode(val)
        p.next = node
        p = node
    return head

def is_same_list(p1, p2):
    if p1 is None and p2 is None:
        return True
    if not p1 or not p2:
        return False
    return p1.val == p2.val and is_same_list(p1.next, p2.next)

class TreeNode:
    def __init__(self, val=0, left=None, right=None):
        self.val = val
        self.left = left
        self.right = right

def tree_node(values: list):
    if not values:
        return None
    root = TreeNode(values[0])
    i = 1
    queue = deque([root])
    while queue:
        node = queue.popleft()
        if i < len(values) and values[i] is not None:
            node.left = TreeNode(values[i])
            queue.append(node.left)
        i += 1
        if i < len(values) and values[i] is not None:
            node.right = TreeNode(values[i])
            queue.append(node.right)
        i += 1
    return root

def is_same_tree(p, q):
    if not p and not q:
        return True
    elif not p or not q:
        return False
    elif p.val != q.val:
        return False
    return is_same_tree(p.left, q.left) and is_same_tree(p.right, q.right)
"""
REVERSED = """
class Solution:
    def f(self, head: Optional[ListNode]) -> Optional[ListNode]:
        last = None
        while head:
            head.next, last, head = last, head, head.next
        return last"""
MIRRORED = """
class Solution:
    def f(self, root: Optional[TreeNode]) -> Optional[TreeNode]:
        if root:
            root.left, root.right = self.f(root.right), self.f(root.left)
        return root"""
KODCODE = """from solution import top_k, mean

def test_top():
    assert top_k([3, 1, 2], 2) == [3, 2]

def test_mean():
    assert abs(mean([1, 2]) - 1.5) < 1e-9
    try:
        mean([])
    except ValueError:
        pass
    else:
        assert False
"""
TOP = "def top_k(values, k): return sorted(values)[::-1][:k]\n"
MEAN = """def mean(values):
    if not values:
        raise ValueError('empty')
    return sum(values) / len(values)"""
BIGCODE = """
import unittest

class TestCases(unittest.TestCase):
    def setUp(self):
        self.values = [3, 1]
    def test_sorted(self):
        self.assertEqual(task_func(self.values), [1, 3])
    def test_error(self):
        with self.assertRaises(TypeError):
            task_func(None)
"""
PYTEST_CLASS = """
class TestF:
    def test_one(self):
        assert f(1) == 2
    def test_two(self):
        assert f(2) == 3
"""
SUM_CASES = [
    {"input": "1 2\n", "output": "3\n", "testtype": "stdin"},
    {"input": "10 -2", "output": "8", "testtype": "stdin"},
]
CALLS = [
    {"input": "[3, 1, 2]\n2", "output": "[3, 2]", "testtype": "functional"},
    {"input": "[1]\n1", "output": "[1]", "testtype": "functional"},
]
PACKED = base64.b64encode(zlib.compress(pickle.dumps(json.dumps(CALLS)))).decode()

ROWS = {
    "taco_stdin": {"input_output": json.dumps({"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]})},
    "taco_lines": {"input_output": {"inputs": [["2", "1 2"]], "outputs": [["3", "0.5"]]}},
    "taco_fn": {"input_output": {"fn_name": "f", "inputs": [[[1, 2]]], "outputs": [[2, 1]]}},
    "apps_fn": {"input_output": json.dumps({"fn_name": "f", "inputs": [[5], [0]], "outputs": [["odd"], ["even"]]})},
    "apps_yes": {"input_output": {"inputs": ["3\n4\n"], "outputs": ["NO\nYES\n"]}},
    "livecodebench_stdin": {"public_test_cases": json.dumps(SUM_CASES[:1]), "private_test_cases": json.dumps(SUM_CASES[1:])},
    "livecodebench_call": {
        "public_test_cases": json.dumps(CALLS[:1]), "private_test_cases": PACKED,
        "metadata": '{"func_name": "f"}', "starter_code": SOLUTION,
    },
    "deepcoder_call": {"tests": json.dumps([{"type": "function_call", "fn_name": "f", "input": [[3, 1], 1], "output": [3]}])},
    "deepcoder_metadata": {"tests": [{**CALLS[0], "metadata": {"func_name": "f"}}]},
    "code_contests": {
        "public_tests": {"input": ["1 2\n"], "output": ["3\n"]},
        "private_tests": {"input": ["5 5\n"], "output": ["10\n"]},
        "generated_tests": {"input": [], "output": []},
    },
    "mbpp": {
        "task_id": 2, "test_setup_code": "", "challenge_test_list": [],
        "test_list": ["assert set(f((3, 4, 5),(5, 4))) == set((4, 5))", "assert f((1,), (2,)) == ()"],
    },
    "mbpp_imports": {"test_imports": ["import math"], "test_list": ["assert math.isclose(f(10), 314.159, rel_tol=0.001)"]},
    "mbpp_builtin": {"test_list": ["assert sum(10,15) == 6", "assert sum(100,150) == 93"]},
    "mbpp_plus": {"test": HUMANEVAL_PLUS_TEST + "inputs = [[[1.0]], [[2.0, 4.0]]]\nresults = [1.0, 3.0]\n"
                  "for i, (inp, exp) in enumerate(zip(inputs, results)):\n    assertion(f(*inp), exp, 0)\n"},
    "acecode": {"test_cases": ["assert f([1, 2]) == {'a': 1, 2: (3,)}"]},
    "humaneval": {"prompt": HUMANEVAL_PROMPT, "test": HUMANEVAL_TEST, "entry_point": "has_close"},
    "humaneval_helper": {"prompt": CYCLIC_PROMPT, "test": CYCLIC_TEST, "entry_point": "decode_cyclic"},
    "humaneval_instruct": {"prompt": f"Complete:\n```python\n{CYCLIC_PROMPT}```\n", "test": CYCLIC_TEST, "entry_point": "decode_cyclic"},
    "humaneval_plus": {"test": HUMANEVAL_PLUS_TEST + "\ndef check(candidate):\n    inputs = [[[1.0]], [[2.0, 4.0]]]\n"
                       "    results = [1.0, 3.0]\n    for inp, exp in zip(inputs, results):\n"
                       "        assertion(candidate(*inp), exp, 0)\n", "entry_point": "f"},
    "leetcode": {
        "starter_code": SOLUTION, "prompt": LEETCODE_PROMPT, "entry_point": "Solution().f",
        "test": "def check(candidate):\n    assert candidate(nums = [3,1,2],k = 2) == [3, 2]\n    assert candidate(nums = [1],k = 1) == [1]\n",
        "input_output": [{"input": "nums = [3,1,2], k = 2", "output": "[3, 2]"}],
    },
    "leetcode_list": {
        "prompt": LEETCODE_PROMPT, "entry_point": "Solution().f",
        "test": "def check(candidate):\n    assert is_same_list(candidate(head = list_node([1,2,3])), list_node([3,2,1]))\n"
                "    assert is_same_list(candidate(head = list_node([])), list_node([]))\n",
    },
    "leetcode_tree": {
        "prompt": LEETCODE_PROMPT, "entry_point": "Solution().f",
        "test": "def check(candidate):\n    assert is_same_tree(candidate(root = tree_node([4,2,7,None,3])), tree_node([4,7,2,None,None,3]))\n",
    },
    "kodcode": {"test": KODCODE, "style": "instruct"},
    "bigcodebench": {"test": BIGCODE, "entry_point": "task_func"},
    "pytest_class": {"test": PYTEST_CLASS},
    "eurus": {"answer": json.dumps({"inputs": ["1 2\n"], "outputs": ["3\n"]})},
}  # fmt: skip
"""Name -> columns; `answer` is the ground truth, `prompt` both prompt and column."""

ADD = "a, b = map(int, input().split())\nprint(a + b)"
MULTIPLY = "a, b = map(int, input().split())\nprint(a * b)"
RADIX = "def f(r): return 3.14159 * r * r"
MEAN_F = "def f(values): return sum(values) / len(values)"
DECODE = "def decode_cyclic(s):\n    g = [s[i:i+3] for i in range(0, len(s), 3)]\n    return ''.join(x[-1] + x[:-1] if len(x) == 3 else x for x in g)"
RIGHT = {
    "taco_stdin": [
        ADD,
        "import sys\nprint(sum(map(int, sys.stdin.read().split())))",
        "import sys\nfor line in sys.stdin:\n    print(sum(int(x) for x in line.split()))",
        "import sys\ninput = sys.stdin.readline\nsys.stdout.write(str(sum(map(int, input().split()))))",
        "print(sum(map(int, open(0).read().split())))",
        "print(sum(map(int, open('/dev/stdin').read().split())))",
        "import fileinput\nfor line in fileinput.input():\n    print(sum(map(int, line.split())))",
        "import numpy as np\nprint(np.array(input().split(), dtype=np.int64).sum())",
        "def main():\n    a, b = map(int, input().split())\n    print(a + b, end='')\nif __name__ == '__main__':\n    main()",
        "import threading, sys\nsys.setrecursionlimit(10**7)\nthreading.stack_size(1 << 26)\ndef main():\n    print(sum(map(int, input().split())))\nt = threading.Thread(target=main)\nt.start()\nt.join()",
        "import os, io\ninput = io.BytesIO(os.read(0, os.fstat(0).st_size)).readline\na, b = map(int, input().split())\nos.write(1, b'%d' % (a + b))",
        "import sys\nout = open(1, 'w')\nprint(sum(map(int, sys.stdin.readline().split())), file=out)",
        "import sys, io, atexit\nsys.stdout = io.StringIO()\natexit.register(lambda: sys.__stdout__.write(sys.stdout.getvalue()))\nprint(sum(map(int, input().split())))",
        "from __future__ import annotations\nimport asyncio\nclass A:\n    def __init__(self, x: int | None): self.x = x\nprint(A(sum(map(int, input().split()))).x)",
        "import sys\nprint(sum(map(int, sys.stdin.buffer.read().split())))\nsys.stdout.close()",
        "print(sum(map(int, input().split())))\nimport sys\nsys.exit()",
        "try:\n    while True:\n        print(sum(map(int, input().split())))\nexcept EOFError:\n    pass",
    ],
    "taco_lines": ["n = int(input())\nprint(sum(map(int, input().split())))\nprint(1 / n)"],
    "taco_fn": ["def f(x): return x[::-1]", "class Solution:\n    def f(self, x): return [x[1], x[0]]"],
    "apps_fn": ["def f(n): return 'odd' if n % 2 else 'even'", "def f(n):\n    return ['even', 'odd'][n & 1]"],
    "apps_yes": ["for _ in range(2): print('YNEOS'[int(input()) % 2::2])"],
    "livecodebench_stdin": [ADD],
    "livecodebench_call": [
        "class Solution:\n    def f(self, nums: List[int], k: int) -> List[int]:\n        return nlargest(k, nums)",
        "from typing import List\nclass Solution:\n    def f(self, nums: List[int], k: int) -> List[int]:\n        return sorted(nums, reverse=True)[:k]",
        "class Solution(object):\n    def f(self, nums, k):\n        h = []\n        for x in nums: heapq.heappush(h, -x)\n        return [-heapq.heappop(h) for _ in range(k)]",
        "import math\nclass Solution:\n    def f(self, nums, k):\n        return sorted(nums)[::-1][:pow(k, 1, 100)]",
    ],
    "deepcoder_call": ["def f(x, k): return sorted(x)[-k:]"],
    "deepcoder_metadata": ["def f(x, k): return sorted(x)[::-1][:k]"],
    "code_contests": [ADD],
    "mbpp": [
        "def f(a, b): return tuple(set(a) & set(b))",
        "import re\ndef helper(a, b): return [x for x in a if x in b]\ndef f(a, b):\n    return tuple(helper(a, b))",
    ],
    "mbpp_imports": [RADIX, "import math\ndef f(r): return math.pi * r ** 2"],
    "mbpp_builtin": ["def sum(a, b):\n    return {10: 6, 100: 93}[a]"],
    "mbpp_plus": [MEAN_F],
    "acecode": ["def f(x): return {'a': 1, 2: (3,)}"],
    "humaneval": ["from typing import List" + CLOSE, CLOSE, HUMANEVAL_PROMPT + CLOSE[CLOSE.index("    return"):]],
    "humaneval_helper": [DECODE, CYCLIC_PROMPT.split("def decode")[0] + DECODE],
    "humaneval_instruct": [DECODE],
    "humaneval_plus": [MEAN_F],
    "leetcode": [
        SOLUTION + "return sorted(nums)[::-1][:k]",
        "from functools import cache\nclass Solution:\n    def f(self, nums, k):\n        @cache\n        def g(n): return nlargest(n, nums)\n        return list(g(k))",
        "class Solution:\n    def f(self, nums: list[int], k: int) -> Optional[List[int]]:\n        c = Counter(nums); d = defaultdict(int); q = deque()\n        return sorted(c.elements(), key=lambda x: -x)[:min(k, inf)]",
    ],
    "leetcode_list": [
        REVERSED,
        "class ListNode:\n    def __init__(self, val=0, next=None):\n        self.val, self.next = val, next\n" + REVERSED,
        "class Solution:\n    def f(self, head):\n        node = None\n        while head:\n            node, head = ListNode(head.val, node), head.next\n        return node",
    ],
    "leetcode_tree": [MIRRORED],
    "kodcode": [TOP + MEAN],
    "bigcodebench": ["def task_func(values): return sorted(values)"],
    "pytest_class": ["def f(x): return x + 1"],
    "eurus": [ADD],
}  # fmt: skip
WRONG = {
    "taco_stdin": [
        MULTIPLY, ADD + "\nprint()\nprint(1)", "print(3)", "", ADD + "\n1 / 0", ADD + "\nraise StopIteration",
        "import sys\nsys.stdin = None\n" + ADD, "import os\nos._exit(0)",
    ],
    "taco_lines": ["input()\nprint(3, 0.5)", "print('3')\nprint('.4')"],
    "taco_fn": ["def f(x): return x", "def f(x): return [2, 1, 0]", "def f(x): raise StopIteration"],
    "apps_fn": ["def f(n): return 'odd'", "def f(n): return ['odd' if n % 2 else 'even', '']"],
    "apps_yes": ["print('NO\\nyes')"],
    "livecodebench_stdin": ["print(3)"],
    "livecodebench_call": ["class Solution:\n    def f(self, nums, k): return sorted(nums)[:k]",
                           "class Solution:\n    def g(self, nums, k): return sorted(nums)[::-1][:k]"],
    "deepcoder_call": ["def f(x, k): return x[1:]"],
    "deepcoder_metadata": ["def f(x, k): return None"],
    "code_contests": [MULTIPLY, "print(3)"],
    "mbpp": ["def f(a, b): return set(a) & set(b)", "def f(a, b): raise StopIteration",
             "def set(x): return 1\ndef f(a, b): return ()"],
    "mbpp_imports": ["def f(r): return 31", "class math:\n    isclose = lambda *a, **k: True\ndef f(r): return 1"],
    "mbpp_builtin": ["def sum(a, b): return 6", "pass"],
    "mbpp_plus": ["def f(values): return 1.0", "def assertion(*a): pass\ndef f(x): return 1.0"],
    "acecode": ["def f(x): return {'a': 1, 2: [3]}"],
    "humaneval": [HUMANEVAL_PROMPT, "def has_close(n, t): return True", "def check(c): pass\ndef has_close(n, t): pass"],
    "humaneval_helper": ["def encode_cyclic(s): return s\ndef decode_cyclic(s): return s", "def decode_cyclic(s): return encode_cyclic(s)"],
    "humaneval_instruct": ["def encode_cyclic(s): return s\ndef decode_cyclic(s): return s"],
    "humaneval_plus": ["def f(values): return [1.0]"],
    "leetcode": [SOLUTION + "return sorted(nums)[:k]", "def f(nums, k): return sorted(nums)[::-1][:k]"],
    "leetcode_list": [
        "class Solution:\n    def f(self, head): return head",
        "def is_same_list(a, b): return True\nclass Solution:\n    def f(self, head): return head",
        "class Odd:\n    def __eq__(self, other): return True\nclass Solution:\n    def f(self, head): return Odd()",
        "class Solution:\n    def f(self, head):\n        head = ListNode(3)\n        head.next = head\n        return head",
    ],
    "leetcode_tree": ["class Solution:\n    def f(self, root): return root"],
    "kodcode": [TOP + MEAN.replace("ValueError", "StopIteration"), TOP, TOP + "import sys\n" + MEAN.replace("raise ValueError('empty')", "sys.exit()")],
    "bigcodebench": ["def task_func(values): return values", "def task_func(values): return sorted(values or [])"],
    "pytest_class": ["def f(x): return 2"],
    "eurus": ["print(4)"],
}  # fmt: skip
