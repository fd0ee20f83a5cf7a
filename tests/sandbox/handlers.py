"""Handlers of sessions, for test_sessions.py."""

import contextlib
import os
import signal
import subprocess
import sys
import time


def make_counter(start=0, refuse=False):
    """Return what does as the request says; its state is the number of requests."""
    if refuse:
        raise ValueError("no such number")
    count = [start]

    def handle(request):
        count[0] += 1
        what, *arguments = request if isinstance(request, tuple) else (request,)
        return {"count": count[0], **(globals()[what](*arguments) or {})}

    return handle, {"from": start}


def well():
    pass


def echo(value):
    return {"value": value}


def identify():
    return {"process": os.getpid(), "template": os.getppid()}


def sleep():
    time.sleep(600)


def loop():
    while True:
        pass


def raises():
    raise RuntimeError("no such test")


def vanish():
    os._exit(0)


def fill():
    return {"value": bytearray(10**10)}


def leave_two():
    """Leave one child in the group, and one out of it."""
    for leaves in (False, True):
        if os.fork() == 0:
            if leaves:
                os.setsid()
            time.sleep(600)
            os._exit(0)


def leave_children():
    """Leave two, and one whose parent has ended."""
    leave_two()
    line = [sys.executable, "-c", "import time; time.sleep(600)"]
    if (child := os.fork()) == 0:
        subprocess.Popen(line, start_new_session=True)
        os._exit(0)
    os.waitpid(child, 0)


def files():
    found = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{number}"))
    return {"files": sorted(name.partition(":")[0] for name in found if "/proc/" not in name)}


def write_replies(data):
    """Write to whatever pipe is open for that."""
    for number in range(3, 64):
        with contextlib.suppress(OSError):
            os.write(number, data)


def signals():
    names = "SIGINT", "SIGTERM", "SIGUSR1"
    return {"ignored": [signal.getsignal(getattr(signal, n)) == signal.SIG_IGN for n in names]}


def kill_template():
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)


def stop_itself():
    os.kill(os.getpid(), signal.SIGSTOP)


def nap(seconds):
    began = time.monotonic()
    time.sleep(seconds)
    return {"value": [began, time.monotonic()]}
