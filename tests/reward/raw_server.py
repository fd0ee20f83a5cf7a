"""A server that sends whatever bytes a test gives it, or nothing until it closes."""

import json
import socket
import threading


class RawServer:
    """One thread for each connection.

    Args:
        reply: (request's body as an object, its headers as text, connection) -> bytes to send, or
            None where it has sent or broken what it wanted. The connection is closed afterwards.
    """

    def __init__(self, reply):
        self.reply, self.asked, self.closed = reply, [], threading.Event()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}/v1"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection):
        with connection:
            data = b""
            while b"\r\n\r\n" not in data:
                data += (part := connection.recv(65536))
                if not part:
                    return
            head, _, body = data.partition(b"\r\n\r\n")
            headers = head.decode().lower()
            length = int(headers.partition("content-length: ")[2].split("\r\n")[0])
            while len(body) < length:
                body += connection.recv(65536)
            self.asked.append(headers)
            try:
                if found := self.reply(json.loads(body), head.decode(), connection):
                    connection.sendall(found)
                    connection.shutdown(socket.SHUT_WR)
                    connection.settimeout(5)
                    while connection.recv(65536):
                        pass
            except OSError:
                pass  # The judge has hung up.

    def hold(self):
        """Send nothing more until the server closes."""
        self.closed.wait(60)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.closed.set()
        self.listener.close()


def http(body=b"", status=200, content_type="application/json", length=None, **headers):
    """Return a whole HTTP reply; header names with _ for -."""
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"HTTP/1.1 {status} X", f"Content-Type: {content_type}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    if not any(line.lower().startswith("transfer-encoding") for line in lines):
        lines.append(f"Content-Length: {len(body) if length is None else length}")
    return "\r\n".join([*lines, "Connection: close", "", ""]).encode() + body


def completion(text="YES", *, top=None, **changes):
    """Return a reply that serves as a chat completion and as a completion of a text.

    Args:
        text: the answer.
        top: the list of top_logprobs; None: no log-probabilities.
        changes: of the choice.
    """
    choice = {"index": 0, "text": text, "message": {"role": "assistant", "content": text},
              "finish_reason": "stop", "logprobs": None}  # fmt: skip
    if top is not None:
        choice["logprobs"] = {"content": [{"token": "A", "logprob": -0.1, "top_logprobs": top}]}
    return {"id": "1", "created": 0, "model": "m", "choices": [{**choice, **changes}]}
