"""The report's responses, token by token: what the page's script is given.

Not exercised: the shading itself, which browsers alone do.
"""

import pytest

from tests import jsonl
from tests.run.report.test_page import HOSTILE, Page, write_run
from vapo_megatron.run.report.page import build_report


def written(run_dir, lengths, num_tokens=None):
    """A run of one step whose first group has responses of these numbers of tokens."""
    write_run(run_dir, num_steps=1)
    file = run_dir / "rollouts" / "step_000001.jsonl"
    first, second = jsonl.read(file)
    for response, length in zip(first["responses"], lengths):
        response["num_tokens"] = num_tokens or length
        response["tokens"] = {
            "pieces": [f"p{i}" for i in range(length)],
            "values": [i / 1000 for i in range(length)],
            "advantages": [-i / 1000 for i in range(length)],
            "entropy": [None] * length,
        }
    return file, first, second


def finished(run_dir, file, *groups) -> tuple[str, Page]:
    jsonl.write(file, groups)
    text = build_report(run_dir).read_text(encoding="utf-8")
    return text, Page(text)


def test_each_response_has_its_tokens(tmp_path):
    file, first, second = written(tmp_path / "run", [3, 0, 5])
    text, page = finished(tmp_path / "run", file, second, first)
    tokens = page.data["tokens"]
    # The group without tokens stands first: 16 responses.
    assert tokens[:16] == [None] * 16 and tokens[19:] == [None] * 13
    for number, response in enumerate(first["responses"][:3], 16):
        assert tokens[number] == {**response["tokens"], "gap": None}
        assert f'<pre data-response="{number}">{response["text"]}</pre>' in text
    assert [v for n, v in page.attributes if n == "data-response"] == list(map(str, range(32)))
    assert ("data-step", "1") in page.attributes


def test_responses_without_values(tmp_path):
    """Of a run without a critic."""
    file, first, _ = written(tmp_path / "run", [3] * 16)
    for response in first["responses"]:
        del response["tokens"]["values"]
    _, page = finished(tmp_path / "run", file, first)
    assert set(page.data["tokens"][0]) == {"pieces", "advantages", "entropy", "gap"}


def test_pieces_are_inert(tmp_path):
    file, first, _ = written(tmp_path / "run", [2])
    pieces = [HOSTILE, "<script>alert(3)</script>\ud800"]
    first["responses"][0]["tokens"]["pieces"] = pieces
    first["responses"][0]["text"] = "".join(pieces)
    text, page = finished(tmp_path / "run", file, first)
    assert text.count("<script") == 2 and page.tags.count("script") == 2 and "img" not in page.tags
    assert page.data["tokens"][0]["pieces"] == pieces
    # The script makes text nodes of them; it never parses HTML.
    script = page.scripts[1]
    assert "replaceChildren" in script and not {"innerHTML", "insertAdjacentHTML"} & set(
        script.replace(".", " ").replace("(", " ").split()
    )


def as_episode(group):
    """Make a group's first response an episode that its turns have cut."""
    turns = [
        {"action": "p0p1<end>", "observation": "<b>seen</b>", "reward": -0.5, "end": 2},
        {"action": "p2", "observation": "", "reward": 0.25, "end": 3},
    ]
    more = {"turns": turns, "begin": f"{group['prompt']} told", "truncated": True}
    more |= {"cut_by": "environment.max_turns", "note": "cut <here>"}
    group["responses"][0] |= more


def test_an_episode_shows_its_turns(tmp_path):
    file, first, _ = written(tmp_path / "run", [3, 3])
    as_episode(first)
    text, page = finished(tmp_path / "run", file, first)
    episode, other = page.data["tokens"][:2]
    # End, reward, and what was observed.
    assert episode["turns"] == [[2, -0.5, "<b>seen</b>"], [3, 0.25, ""]]
    assert "turns" not in other and episode["pieces"] == ["p0", "p1", "p2"]
    assert (
        '<pre class="observation"> told</pre><pre data-response="0">p0p1&lt;end&gt;'
        '<span class="turn">turn 1, reward -0.5</span>'
        '<span class="observation">&lt;b&gt;seen&lt;/b&gt;</span>'
        'p2<span class="turn">turn 2, reward +0.25</span></pre>'
    ) in text
    assert '3 tokens in 2 turns</span><span class="truncated">cut by environment.max_turns<' in text
    assert '<div class="caption">cut &lt;here&gt;</div>' in text


def test_long_observations_and_many_turns_are_bounded(tmp_path):
    file, first, _ = written(tmp_path / "run", [3])
    as_episode(first)
    response = first["responses"][0]
    response["turns"] = [
        {**response["turns"][0], "observation": "a" * 5000 + "b" * 5000, "end": i + 1}
        for i in range(200)
    ]
    text, page = finished(tmp_path / "run", file, first)
    turns = page.data["tokens"][0]["turns"]
    # 8,000 characters for 64 actions and 64 observations: 31 at either end.
    assert len(turns) == 64 and turns[5] == [6, -0.5, "a" * 31, 10_000 - 62, "b" * 31]
    assert text.count("9,938 characters left out") == 64 and "136 turns left out" in text


def test_what_nobody_sees_has_a_sign(tmp_path):
    file, first, _ = written(tmp_path / "run", [2])
    pieces = ["a\0\x1b\r", "\u202eb\u200f\u2066\ufeff\x85\n\t\u200d\u00e9"]
    first["responses"][0]["tokens"]["pieces"] = pieces
    for text in (first, first["responses"][0]):
        text |= {"prompt": "".join(pieces), "answer": "".join(pieces), "text": "".join(pieces)}
    _, page = finished(tmp_path / "run", file, first)
    u = "\u27e8U+{}\u27e9".format
    seen = ["a\u2400\u241b\u240d"]
    seen += [f"{u('202E')}b{u('200F')}{u('2066')}{u('FEFF')}{u('0085')}\n\t\u200d\u00e9"]
    assert page.data["tokens"][0]["pieces"] == seen
    assert page.visible.count("".join(seen)) == 3, "prompt, answer and response"
    assert not {"\0", "\x1b", "\r", "\u202e", "\u200f", "\u2066"} & set(page.visible)


@pytest.mark.parametrize("length,num_tokens", [(1024, 16384), (16000, 16000)])
def test_long_responses_keep_their_ends(tmp_path, length, num_tokens):
    file, first, second = written(tmp_path / "run", [length] * 16, num_tokens)
    text, page = finished(tmp_path / "run", file, first, second)
    tokens = page.data["tokens"][7]
    # 120,000 tokens for 32 responses: 3,750 each, if so many were kept.
    half = min(length, 3750) // 2
    assert tokens["gap"] == [half, num_tokens - 2 * half]
    assert tokens["pieces"][:half] == [f"p{i}" for i in range(half)]
    assert tokens["pieces"][half:] == [f"p{i}" for i in range(length - half, length)]
    assert all(len(tokens[name]) == 2 * half for name in ("values", "advantages", "entropy"))
    assert len(text) < 4_000_000
