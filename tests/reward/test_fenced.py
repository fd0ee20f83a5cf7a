"""Which block of a response is its program, however its fences stand."""

import time

import pytest

from vapo_megatron.reward.code_tests import LANGUAGES, parsed
from vapo_megatron.reward.fenced import last_block

ANSWER = "```python\nprint(1)\n```\nDone."


def found(text):
    return last_block(text, LANGUAGES, parsed)


@pytest.mark.parametrize(
    "thinking",
    [
        "<think>Let me try:\n```python\nx = 1\nno, wait.\n</think>\n",
        "<think>Let me try:\n```\nx = 1\n</think>\n",
        "<think>\n````\nx = 1\n</think>\n",
        "<think>\n~~~python\nx = 1\n</think>\n",
        "<think>\n```python\nx = 1\n```\nand\n```\n3\n</think>So:\n",
        # Without a mark: a fence with a label opens a block, whatever was open before.
        "Let me try:\n```python\nx = 1\nno, wait.\n",
        "Let me try:\n```\nx = 1\nno, wait.\n",
        "Let me try:\n````\nx = 1\n",
        "Let me try:\n~~~\nx = 1\n",
        "Let me try:\n~~~~~ text\n`````\n````\nx = 1\n",
        "<think>\n```python\nx = 1\n```\nbut the thinking goes on\n",
    ],
)
def test_a_fence_that_is_never_closed_turns_nothing_inside_out(thinking):
    assert found(thinking + ANSWER) == "print(1)"
    if "</think>" in thinking:
        assert found(thinking + ANSWER.replace("python", "")) == "print(1)"
        assert found(thinking + ANSWER.replace("```", "~~~")) == "print(1)"


def test_a_label_opens_a_block_whatever_was_open():
    assert last_block("So:\n```json\n{1\n\nNo:\n```json\n{}\n```\nDone.", ("json",)) == "{}"


def test_a_fence_without_label_that_is_left_open():
    assert (
        found("So:\n```\nx = 1 but no\n\nThe answer:\n```\nprint(1)\n```\nDone so.") == "print(1)"
    )
    assert found("So:\n```python\nx = 1 but no\n\nIt is:\n```\nprint(1)\n```") == "print(1)"
    # The last block is cut off; what stands between two blocks is prose.
    assert found("```\nprint(1)\n```\nIt is better so:\n```\nprint(2)") == "print(1)"
    assert found("```python\nprint(1)\n```\n```") == "print(1)"


def test_the_answer_counts_before_the_thinking():
    assert found("<think>\n```python\n2\n```\n</think>\n```\nprint(1)\n```") == "print(1)"
    assert found("<think>\n```python\nprint(1)\n```\n</think>\nAs above.") == "print(1)"
    assert found("<think>\n```python\nprint(1)\n```\nand on") == "print(1)"
    assert found("```python\nprint('</think>')\n```") == "print('</think>')"


@pytest.mark.parametrize(
    "label",
    ["python3.11", "py", "Python 3", "{.python}", "{python}", "python3", "PYTHON", "py3", "pypy3",
     " python", "python title=\"a.py\"", "python:a.py", "{.python .numberLines}", "python="],
)  # fmt: skip
def test_labels_of_python(label):
    assert found(f"```{label}\nprint(1)\n```\n```\nprint(2)\n```") == "print(1)"
    assert found(f"~~~{label}\nprint(1)\n~~~") == "print(1)"


@pytest.mark.parametrize("label", ["pycon", "python-repl", "cpp", "c++", "sh", "pytb", "text", "3"])
def test_other_labels(label):
    assert found(f"```{label}\nprint(1)\n```") is None


@pytest.mark.parametrize(
    ("text", "block"),
    [
        ("~~~python\na\n~~~", "a"),
        ("~~~python\n```\na\n~~~", "```\na"),
        ("```python\n~~~\na\n```", "~~~\na"),
        ("````python\n```\na\n```\n````", "```\na\n```"),
        ("```python\na\n`````", "a"),
        ("1. So:\n   ```python\n   if a:\n       b\n   ```", "if a:\n    b"),
        ("- ```python\n  if a:\n      b\n  ```", "if a:\n    b"),
        ("2) ~~~py\n   a\n   ~~~", "a"),
        ("> ```python\n> if a:\n>     b\n> ```", "if a:\n    b"),
        ("\t```python\n\ta\n\t```", "a"),
        ("  ```python\n      if a:\n          b\n  ```", "if a:\n    b"),
        ("```python\na = '''\n   \n'''\n```", "a = '''\n   \n'''"),
        ("```python\na = '\x0c\u2028'\n```", "a = '\x0c\u2028'"),
        ("```python\r\na\r\nb\r\n```\r\n", "a\r\nb\r"),
        ("```markdown\n```python\na\n```\n```", "a"),
        ("````markdown\n```python\na\n```\n````", "a"),
        # A program with a block in its docstring.
        ('```python\ndef f():\n    """\n    ```python\n    f()\n    ```\n    """\n```',
         'def f():\n    """\n    ```python\n    f()\n    ```\n    """'),
        ("```python x` y\na\n```", None),
        ("~~~python x` y\na\n~~~", "a"),
    ],
)  # fmt: skip
def test_fences_of_every_form(text, block):
    assert found(text) == block


@pytest.mark.parametrize(
    "text",
    ["```\n" * 50_000, "```python\n" * 30_000, "~~~\n```a\n" * 30_000, "`" * 10**6, " " * 10**6,
     "- " * 10**6, "\n".join("`" * n for n in range(1400, 3, -1)), "</think>" * 10**5,
     "\n".join("`~"[n % 2] * (3 + n // 2) + "a" for n in range(1000, 0, -1))],
)  # fmt: skip
def test_no_response_takes_long(text):
    began = time.process_time()
    last_block(text, LANGUAGES, parsed)
    assert time.process_time() - began < 5
