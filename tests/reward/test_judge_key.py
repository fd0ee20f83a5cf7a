"""The key is in no note, log, cache or traceback, whatever a server sends back.

Not exercised: a server that sends back a part of the key, or encrypts it.
"""

import base64
import html
import json
import logging
import re
from urllib.parse import quote

import pytest

from tests.reward.raw_server import RawServer, completion, http
from vapo_megatron.errors import ConfigError
from vapo_megatron.reward.judge import Judge, Pairwise
from vapo_megatron.reward.redaction import redactor
from vapo_megatron.reward.verifier import Problem

KEY = "sk-nobody/may+write<this>&down"
PROBLEM = Problem("p", "a")


def base64_of(text):
    return base64.b64encode(text.encode()).decode()


FORMS = {
    "plain": KEY,
    "bearer": f"Bearer {KEY}",
    "upper case": KEY.upper(),
    "backwards": KEY[::-1],
    "url": quote(KEY, safe=""),
    "path": quote(KEY),
    "html": html.escape(KEY),
    "hex": KEY.encode().hex(),
    "base64": base64_of(KEY),
    "base64 after 1": base64_of(f":{KEY}"),
    "base64 of the header": base64_of(f"Authorization: Bearer {KEY}\r\n"),
    "base64 for URLs": base64.urlsafe_b64encode(f"Bearer {KEY}".encode()).decode(),
}


@pytest.fixture
def traces(tmp_path, monkeypatch, capfd, caplog):
    """Call it with notes -> all that may have the key."""
    monkeypatch.setenv("JUDGE_KEY", KEY)
    caplog.set_level(logging.DEBUG)

    def found(*notes):
        written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
        return "".join([*notes, *capfd.readouterr(), caplog.text, written.decode("latin-1")])

    return found


def judged(kind, reply, tmp_path, responses=("x",)):
    with RawServer(reply) as server:
        judge = kind(
            base_url=server.url, model="m", key_variable="JUDGE_KEY", outage_seconds=0.0,
            cache=str(tmp_path / "kept"),
        )  # fmt: skip
        found = list(judge.score(responses, [PROBLEM] * len(responses)))
        judge.close()
    assert all(f"authorization: bearer {KEY}".lower() in headers for headers in server.asked)
    return found if len(found) > 1 else found[0]


def secret_in(text):
    """Return the pieces of ten characters of any form that a text has."""
    header = f"Authorization: Bearer {KEY[:1]}"
    public = " ".join([header, base64_of(header), base64_of(header[15:])])
    pieces = {form[i : i + 10].lower() for form in FORMS.values() for i in range(len(form) - 9)}
    return sorted(p for p in pieces if p in text.lower() and p not in public.lower())


@pytest.mark.parametrize(
    "reply",
    [
        lambda form: http({"error": {"message": f"who is {form}?"}}, status=401),
        lambda form: http({"error": {"message": "x" * 150 + form}}, status=400),
        lambda form: http({"error": {"message": f"who is {form}?"}}, status=503),
        lambda form: http({"error": f"who is {form}?"}),
        lambda form: http(form.encode(), content_type=form),
        lambda form: http(f"<p>{form}".encode(), status=403, X_Key=form, Location=form),
        lambda form: http(status=307, Location=f"http://elsewhere/{form}", Content_Encoding=form),
        lambda form: http(b"x", Content_Encoding=form),
        lambda form: f"HTTP/1.1 {form}\r\n\r\n".encode(),
        lambda form: http(b"x", length=form),
        lambda form: http(completion(f"{form} YES {form}")),
        lambda form: http(completion(f"I say {form}")),
        lambda form: http(completion(finish_reason=form)),
        lambda form: http(completion(message={"content": form, form: form}, text=None)),
    ],
    ids=["401", "at the note's end", "503", "error", "body", "header", "location", "encoding",
         "no status", "length", "answer", "answer without choice", "reason", "message"],
)  # fmt: skip
def test_a_server_that_sends_the_key_back_changes_nothing(reply, traces, tmp_path):
    def answer(body, *_):
        form = re.search(r"Final answer: form (.*)\n", body["messages"][0]["content"])[1]
        return reply(FORMS[form])

    found = judged(Judge, answer, tmp_path, [f"form {name}" for name in FORMS])
    assert len(found) == len(FORMS) and all(verdict.note for verdict in found)
    assert secret_in(traces(*(verdict.note for verdict in found))) == []


def test_the_key_as_a_token_is_not_kept(traces, tmp_path):
    listed = [{"token": t, "logprob": -1.0} for t in ("A", "B", KEY, f"A{KEY}")]
    found = judged(Pairwise, lambda *_: http(completion(KEY, top=listed)), tmp_path)
    assert found.score == 0.5 and secret_in(traces(found.note, str(found))) == []
    assert list((tmp_path / "kept").iterdir())


def test_nothing_shows_the_key_where_a_client_logs_what_it_receives(traces, tmp_path):
    """Fails where httpcore logs its headers, which it does at DEBUG."""
    for name in ("httpx", "httpcore", "httpcore.http11"):
        logging.getLogger(name).setLevel(logging.NOTSET)
    found = judged(Judge, lambda *_: http(completion(), X_Key=KEY), tmp_path)
    assert found.status == "correct" and secret_in(traces(found.note)) == []


@pytest.mark.parametrize("key", [f"{KEY}\nX-More: 1", f"{KEY} {KEY}", f"{KEY}\u00fc", f"{KEY}\x00"])
def test_a_key_that_cannot_be_sent_is_refused_and_not_shown(key, monkeypatch):
    monkeypatch.setattr("os.environ", {"JUDGE_KEY": key})
    with pytest.raises(ConfigError, match="the environment variable JUDGE_KEY has a") as raised:
        Judge(base_url="http://127.0.0.1:9/v1", model="m", key_variable="JUDGE_KEY")
    assert secret_in(str(raised.value)) == []


def test_a_newline_around_the_key_is_no_part_of_it(monkeypatch, tmp_path):
    monkeypatch.setenv("JUDGE_KEY", f" {KEY}\n")
    assert judged(Judge, lambda *_: http(completion()), tmp_path).status == "correct"


@pytest.mark.parametrize("key", [None, ""])
def test_without_a_key_none_is_sent(key, monkeypatch):
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    if key is not None:
        monkeypatch.setenv("JUDGE_KEY", key)
    with RawServer(lambda *_: http(completion())) as server:
        judge = Judge(base_url=server.url, model="m", key_variable="JUDGE_KEY")
        assert [v.status for v in judge.score(["x"], [PROBLEM])] == ["correct"]
        judge.close()
    assert "authorization" not in server.asked[0]


def test_a_key_of_a_few_letters_leaves_texts_as_they_are():
    assert redactor("A")("AN A") == "AN A" and redactor("")("abc") == "abc"
    assert redactor("EMPTY")("empty YES") == "[the key] YES"
    assert json.dumps("x") == redactor(KEY)('"x"')
