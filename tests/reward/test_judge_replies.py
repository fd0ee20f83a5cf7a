"""Whatever a server answers costs one verdict: some ninety replies, over real connections.

Each is asked for once (outage_seconds=0), all through one judge. Not exercised: TLS, proxies.
"""

import gzip
import json
import struct
import zlib
from socket import SO_LINGER, SOL_SOCKET

import pytest

from tests.reward.raw_server import RawServer, completion, http
from vapo_megatron.reward import replies
from vapo_megatron.reward.judge import Judge, Pairwise
from vapo_megatron.reward.verifier import Problem

GOOD = json.dumps(completion()).encode()
TOKENS = [{"token": "A", "logprob": -0.1}, {"token": "B", "logprob": -2.5}]
LIMIT = replies.LARGEST_REPLY_BYTES


def chunked(*chunks):
    return http(b"".join(chunks), Transfer_Encoding="chunked")


def zipped(body):
    return http(gzip.compress(body), Content_Encoding="gzip")


def choice(**changes):
    return http(completion(**changes))


def message(**fields):
    return choice(message={"role": "assistant", **fields}, text=fields.get("content"))


def tokens(listed, **changes):
    return http(completion(top=listed, **changes))


def logprob(value):
    """A reply whose log-probability is this JSON."""
    body = json.dumps(completion(top=[{"token": "A", "logprob": "HERE"}])).replace('"HERE"', value)
    return http(body.encode())


def hangs_up(_, __, connection):
    connection.close()


def resets(_, __, connection):
    connection.sendall(http(GOOD)[:-20])
    connection.setsockopt(SOL_SOCKET, SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def redirects_in_a_circle(_, head, __):
    return http(status=307, Location=head.split()[1])


def endless(_, __, connection):
    connection.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
    while True:  # Until the judge hangs up.
        connection.sendall(b" " * 65536)


def endless_chunks(_, __, connection):
    connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    while True:
        connection.sendall(b"8000\r\n" + b" " * 0x8000 + b"\r\n")


def endless_headers(_, __, connection):
    connection.sendall(b"HTTP/1.1 200 OK\r\n")
    while True:
        connection.sendall(b"X-More: " + b"x" * 60000 + b"\r\n")


NO_COMPLETION = "it answered no completion: "
FAILING = {
    # The body is no completion.
    "empty": (http(), NO_COMPLETION),
    "no content": (http(status=204), NO_COMPLETION),
    "html": (http(b"<html>Welcome</html>", content_type="text/html"), NO_COMPLETION),
    "plain text": (http(b"YES", content_type="text/plain"), NO_COMPLETION),
    "half a JSON": (http(GOOD[: len(GOOD) // 2]), NO_COMPLETION),
    "two JSONs": (http(GOOD + GOOD), NO_COMPLETION),
    "events": (http(b"data: " + GOOD + b"\n\n", content_type="text/event-stream"), NO_COMPLETION),
    "not UTF-8": (http(GOOD.replace(b"YES", b"YES\xff\xfe")), NO_COMPLETION),
    "UTF-16": (http(GOOD.decode().encode("utf-16")), NO_COMPLETION),
    "NUL bytes": (http(bytes(1000)), NO_COMPLETION),
    "random bytes": (http(bytes(range(256)) * 9), NO_COMPLETION),
    "a list": (http([completion()]), NO_COMPLETION),
    "null": (http(b"null"), NO_COMPLETION),
    "a number": (http(b"5"), NO_COMPLETION),
    "a text": (http(b'"YES"'), NO_COMPLETION),
    "true": (http(b"true"), NO_COMPLETION),
    "an empty object": (http({}), NO_COMPLETION),
    "deep lists": (http(b"[" * 200_000), NO_COMPLETION),
    "deep objects": (http(b'{"a":' * 200_000), NO_COMPLETION),
    "deep beside": (http(b'{"x":' + b"[" * 9999 + b"]" * 9999 + b"," + GOOD[1:]), NO_COMPLETION),
    "huge integer": (http(b"9" * 100_000), NO_COMPLETION),
    "huge beside": (http(b'{"x":' + b"9" * 100_000 + b"," + GOOD[1:]), NO_COMPLETION),
    "lone surrogate": (http(GOOD.replace(b"YES", b"\\ud800")), NO_COMPLETION),
    "an error with 200": (http({"error": {"message": "no GPU"}}), "it answered an error: no GPU"),
    "an error text": (http({"error": "no GPU"}), "it answered an error: no GPU"),
    "an error's surrogate": (http(b'{"error": "\\ud800 \\u001b[2J"}'), "an error: [2J"),
    "error null": (http({"error": None}), NO_COMPLETION),
    # The choices.
    "choices null": (http({"choices": None}), NO_COMPLETION + "choices"),
    "choices empty": (http({"choices": []}), NO_COMPLETION + "choices"),
    "choices object": (http({"choices": {"0": 1}}), NO_COMPLETION + "choices"),
    "choices text": (http({"choices": "YES"}), NO_COMPLETION + "choices"),
    "choice null": (http({"choices": [None]}), NO_COMPLETION + "choices.0"),
    "choice text": (http({"choices": ["YES"]}), NO_COMPLETION + "choices.0"),
    "several choices": (http({"choices": completion()["choices"] * 2}), NO_COMPLETION + "choices"),
    "message null": (choice(message=None, text=None), NO_COMPLETION + "choices.0."),
    "message list": (choice(message=["YES"], text=["YES"]), NO_COMPLETION + "choices.0."),
    "message empty": (choice(message={}, text={}), NO_COMPLETION + "choices.0."),
    "content null": (message(content=None), NO_COMPLETION + "choices.0."),
    "thought alone": (message(content=None, reasoning_content="YES"), NO_COMPLETION + "choices.0."),
    "tool call": (
        message(content=None, tool_calls=[{"function": {"name": "YES"}}]),
        NO_COMPLETION + "choices.0.",
    ),
    "refusal": (message(content=None, refusal="YES"), NO_COMPLETION + "choices.0."),
    "content number": (message(content=1), NO_COMPLETION + "choices.0."),
    "content true": (message(content=True), NO_COMPLETION + "choices.0."),
    "content list": (message(content=[{"type": "text", "text": "YES"}]), NO_COMPLETION + "choices"),
    "content object": (message(content={"text": "YES"}), NO_COMPLETION + "choices.0."),
    # How it ended.
    "content filter": (choice(finish_reason="content_filter"), "finish_reason='content_filter'"),
    "tool calls": (choice(finish_reason="tool_calls"), "finish_reason='tool_calls'"),
    "abort": (choice(finish_reason="abort"), "finish_reason='abort'"),
    "reason list": (choice(finish_reason=["stop"]), NO_COMPLETION + "choices.0.finish_reason"),
    "reason number": (choice(finish_reason=0), NO_COMPLETION + "choices.0.finish_reason"),
    # Log-probabilities, which only `pairwise` reads.
    "logprobs list": (choice(logprobs=[1]), NO_COMPLETION + "choices.0.logprobs"),
    "logprobs number": (choice(logprobs=-0.5), NO_COMPLETION + "choices.0.logprobs"),
    "NaN": (logprob("NaN"), "top_logprobs.0.logprob"),
    "infinity": (logprob("Infinity"), "top_logprobs.0.logprob"),
    "1e999": (logprob("1e999"), "top_logprobs.0.logprob"),
    "above 0": (logprob("3.5"), "top_logprobs.0.logprob"),
    "logprob text": (logprob('"-0.5"'), "top_logprobs.0.logprob"),
    "logprob true": (logprob("true"), "top_logprobs.0.logprob"),
    "logprob null": (logprob("null"), "top_logprobs.0.logprob"),
    "token null": (tokens([{"token": None, "logprob": -1.0}]), "top_logprobs.0.token"),
    "token missing": (tokens([{"logprob": -1.0}]), "top_logprobs.0.token"),
    "tokens null": (tokens([None]), "top_logprobs.0"),
    "tokens object": (tokens({"A": -0.1}), "top_logprobs"),
    # Compression, which was not asked for.
    "damaged gzip": (zipped(GOOD)[:-8] + b"x" * 8, "its answer is no gzip"),
    "cut gzip": (http(gzip.compress(GOOD)[:-15], Content_Encoding="gzip"), "gzip that is cut"),
    "no gzip": (http(GOOD, Content_Encoding="gzip"), "its answer is no gzip"),
    "gzip bomb": (zipped(bytes(50 * LIMIT)), f"over {LIMIT} bytes"),
    "brotli": (http(GOOD, Content_Encoding="br"), "has a Content-Encoding"),
    "double gzip": (http(GOOD, Content_Encoding="gzip, gzip"), "has a Content-Encoding"),
    # Status codes.
    "moved": (http(status=301, Location="http://elsewhere/v1"), "HTTP 301; base_url must be"),
    "circle": (redirects_in_a_circle, "HTTP 307; base_url must be"),
    "unauthorized": (http({"error": {"message": "who?"}}, status=401), "HTTP 401: who?"),
    "not found": (http(b"<html>", status=404), "HTTP 404"),
    "unprocessable": (http({"detail": [{"msg": "x"}]}, status=422), "HTTP 422"),
    "deep error": (http(b"[" * 200_000, status=400), "HTTP 400"),
    "bad gateway": (http(b"<html>", status=502), "no answer for 0 s: HTTP 502"),
    "error of a bomb": (http(b"x", status=400, Content_Encoding="gzip"), "HTTP 400"),
    "teapot's status": (http(status=999), "no answer for 0 s: HTTP 999"),
    # What is no HTTP, or breaks off.
    "hangs up": (hangs_up, "no answer for 0 s: "),
    "resets": (resets, "no answer for 0 s: "),
    "no HTTP": (b"SSH-2.0-OpenSSH_9.2\r\n\r\n", "no answer for 0 s: RemoteProtocolError"),
    "status text": (b"HTTP/1.1 OK\r\n\r\n" + GOOD, "no answer for 0 s: RemoteProtocolError"),
    "short body": (http(GOOD, length=len(GOOD) + 9), "no answer for 0 s: RemoteProtocolError"),
    "negative length": (http(GOOD, length=-1), "no answer for 0 s: RemoteProtocolError"),
    "length text": (http(GOOD, length="long"), "no answer for 0 s: RemoteProtocolError"),
    "chunk size": (chunked(b"zz\r\n", GOOD), "no answer for 0 s: RemoteProtocolError"),
    "chunk cut": (chunked(b"fff\r\n", GOOD), "no answer for 0 s: RemoteProtocolError"),
    "header bytes": (b"HTTP/1.1 200 OK\r\n\xff\x00: \x01\r\n\r\n", "no answer for 0 s: "),
    "endless body": (endless, f"over {LIMIT} bytes"),
    "endless chunks": (endless_chunks, f"over {LIMIT} bytes"),
    "endless headers": (endless_headers, "no answer for 0 s: RemoteProtocolError"),
}
"""Name -> (what is sent, what the note must say)."""

WHOLE = {
    "plain": http(GOOD),
    "another type": http(GOOD, content_type="text/html; charset=latin-1"),
    "no reason": choice(finish_reason=None),
    "chunks": chunked(b"%x\r\n" % len(GOOD), GOOD, b"\r\n0\r\n\r\n"),
    "gzip": zipped(GOOD),
    "deflate": http(zlib.compress(GOOD), Content_Encoding="deflate"),
    "to the end": b"HTTP/1.0 200 OK\r\n\r\n" + GOOD,
    "continue": b"HTTP/1.1 100 Continue\r\n\r\n" * 3 + http(GOOD),
    "more fields": http({**completion(thought="x"), "usage": {"x": [1e300]}}),
    "cookies": http(GOOD, Set_Cookie="=;;;\xe9=\x7f; Expires=never; Max-Age=9e99"),
    "empty logprobs": choice(logprobs={}),
}


def asked(kind, sent, **options):
    """Ask about every reply -> name: verdict, from one judge."""
    names = list(sent)

    def reply(body, head, connection):
        prompt = body.get("prompt") or body["messages"][0]["content"]
        found = sent[prompt.strip("|")]
        return found(body, head, connection) if callable(found) else found

    with RawServer(reply) as server:
        judge = kind(
            base_url=server.url, model="m", outage_seconds=0.0, timeout_seconds=60.0, **options
        )
        found = list(judge.score(names, [Problem("p", "|")] * len(names)))
        judge.close()
    return dict(zip(names, found, strict=True))


KINDS = {
    "judge": (Judge, {"template": "|{response}|"}),
    "judge of bare text": (Judge, {"template": "|{response}|", "chat": False}),
    "pairwise": (Pairwise, {"template": "|{a}{b}"}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_that_a_server_answers_is_more_than_a_failed_verdict(kind):
    use, options = KINDS[kind]
    sent = {name: reply for name, (reply, _) in FAILING.items()}
    if not options.get("chat", True):
        # Of these the text's log-probabilities differ, see below; content is no list of parts.
        sent = {name: reply for name, reply in sent.items() if "logprob" not in FAILING[name][1]}
    found = asked(use, sent, **options)
    assert len(found) >= 62 and {v.status for v in found.values()} == {"failed"}
    assert all(v.note.isprintable() and len(v.note) <= 200 for v in found.values())
    wrong = {name: v.note for name, v in found.items() if FAILING[name][1] not in v.note}
    assert not wrong


@pytest.mark.parametrize("kind", ["judge", "judge of bare text"])
def test_an_odd_reply_that_is_whole_is_a_verdict(kind):
    found = asked(KINDS[kind][0], WHOLE, **KINDS[kind][1])
    assert {name: v.status for name, v in found.items()} == dict.fromkeys(WHOLE, "correct")


def test_probabilities_that_are_rounded_or_minus_infinite_count():
    lists = {
        "rounded": [{"token": "A", "logprob": 1e-6}, {"token": "B", "logprob": -9999.0}],
        "as usual": TOKENS,
        "cut": TOKENS,
    }
    sent = {name: tokens(listed, finish_reason="length") for name, listed in lists.items()}
    sent["infinite"] = http(tokens(TOKENS).partition(b"\r\n\r\n")[2].replace(b"-2.5", b"-Infinity"))
    found = asked(Pairwise, sent, template="|{a}{b}")
    assert {v.score for v in found.values()} == {0.5}  # A in both orders.


def test_a_bomb_is_unpacked_up_to_its_limit():
    bomb = gzip.compress(bytes(20 * LIMIT))
    assert len(replies.decompressed(bomb, "gzip")) == LIMIT + 1
