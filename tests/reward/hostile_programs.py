r"""Hostile programs from a seed: none solves its problem, whatever it does to those around it.

There are three families. An attempt tries what no program may do, and gives the right answer if it
works: its text contains it. A search does not know the answer, and looks for it. The others hang,
crash, or pretend. Should nothing confine them, what they do is bounded: a few hundred processes
that end by themselves, sparse files, signals of number 0.
"""

from __future__ import annotations

import random
import textwrap

MARK = "zebra-"
"""What a search looks for; nothing else has it."""
SHAPES = ("script", "call", "asserts")

ATTEMPT = """
import contextlib, ctypes, fcntl, mmap, os, resource, shutil, signal, socket, subprocess, sys
import tempfile, threading, time
ANSWER, PLACE = {answer!r}, {place!r}
MADE, VICTIM = PLACE + "/made", PLACE + "/victim"
LONG = 20
libc = ctypes.CDLL(None, use_errno=True)
X86 = os.uname().machine == "x86_64"
def forked(number):
    if number == 0:
        time.sleep(LONG)
        os._exit(0)
    return number > 0
def attempt():
{body}
won = False
try:
    won = attempt()
except BaseException as error:
    print(type(error), file=sys.stderr)
def f(x):
    return ANSWER if won else "lost"
if __name__ == "__main__":
    print(f(3))
"""

# Function bodies that return something true if what they try has worked.
ATTEMPTS = {
    # The network
    "socket": "socket.socket(); return True",
    "udp": "socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', 9)); return True",
    "unix_socket": "socket.socket(socket.AF_UNIX); return True",
    "raw_netlink": "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW); return True",
    "socketpair": "socket.socketpair(); return True",
    "listen": "socket.create_server(('127.0.0.1', 0)); return True",
    "connect": """
        try:
            socket.create_connection(('127.0.0.1', 1), timeout=1)
        except ConnectionRefusedError:
            pass
        return True""",
    "resolve": "return socket.getaddrinfo('localhost', 80)",
    "socket_by_number": "return libc.syscall(41, 2, 1, 0) > 0 or libc.syscall(198, 2, 1, 0) > 0",
    # Other processes
    "fork": "return forked(os.fork())",
    "forkpty": "return forked(os.forkpty()[0])",
    "fork_bomb": """
        for _ in range(300):
            forked(os.fork())
        return True""",
    "some_forks": """
        count = 0
        for _ in range(100):
            with contextlib.suppress(OSError):
                count += forked(os.fork())
        return count""",
    "daemon": """
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                for file in range(16):
                    with contextlib.suppress(OSError):
                        os.close(file)
                forked(0)
            os._exit(0)
        return True""",
    "spawn": "return os.posix_spawn('/bin/true', ['true'], {})",
    "system": "return os.system('true') == 0",
    "subprocess": "return subprocess.run([sys.executable, '-c', '']).returncode == 0",
    "exec": "os.execv('/bin/echo', ['echo', ANSWER])",
    "exec_shell": "os.execl('/bin/sh', 'sh', '-c', 'echo ' + ANSWER)",
    "fork_by_number": "return X86 and forked(libc.syscall(57))",
    "clone_by_number": """
        return forked(libc.syscall(56 if X86 else 220, 17, 0, 0, 0, 0))""",
    "clone3": """
        arguments = (ctypes.c_uint64 * 11)(0, 0, 0, 0, 17)
        return forked(libc.syscall(435, arguments, 88))""",
    "fork_of_32_bit": """
        if not X86:
            return False
        code = mmap.mmap(-1, 4096, prot=7)
        code.write(b'\\xb8\\x02\\x00\\x00\\x00\\xcd\\x80\\xc3')  # mov eax, 2; int 0x80; ret
        address = ctypes.addressof(ctypes.c_char.from_buffer(code))
        return forked(ctypes.CFUNCTYPE(ctypes.c_int)(address)())""",
    "socket_of_32_bit": """
        if not X86:
            return False
        low = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x40
        code = mmap.mmap(-1, 4096, flags=low, prot=7)
        address = ctypes.addressof(ctypes.c_char.from_buffer(code))
        code[64:76] = (2).to_bytes(4, 'little') + (1).to_bytes(4, 'little') + bytes(4)
        # push rbx; mov eax, 102; mov ebx, 1; mov ecx, arguments; int 0x80; pop rbx; ret
        code[:21] = (b'\\x53\\xb8\\x66\\0\\0\\0\\xbb\\1\\0\\0\\0\\xb9'
                     + (address + 64).to_bytes(4, 'little') + b'\\xcd\\x80\\x5b\\xc3\\x90')
        return ctypes.CFUNCTYPE(ctypes.c_int)(address)() > 0""",
    "fork_of_x32": "return X86 and forked(libc.syscall(0x40000000 + 57))",
    "many_threads": """
        stop = threading.Event()
        threading.stack_size(65536)
        for _ in range(300):
            thread = threading.Thread(target=stop.wait, args=[LONG], daemon=True)
            with contextlib.suppress(RuntimeError):
                thread.start()
        count = threading.active_count()
        stop.set()
        return count > 150""",
    # Files
    "read_passwd": "return open('/etc/passwd').read()",
    "read_own_memory": "return open('/proc/self/mem', 'rb').seek(0) == 0",
    "read_parents_environment": "return open(f'/proc/{os.getppid()}/environ').read()",
    "read_parents_command": "return open(f'/proc/{os.getppid()}/cmdline').read()",
    "read_parents_memory": "return open(f'/proc/{os.getppid()}/maps').read()",
    "read_first_process": "return os.readlink('/proc/1/exe')",
    "stat": "return os.stat(PLACE).st_ino",
    "exists": "return os.path.exists(PLACE)",
    "stat_by_hand": """
        buffer = ctypes.create_string_buffer(256)
        return libc.syscall(262 if X86 else 79, -100, VICTIM.encode(), buffer, 0x1000) == 0""",
    "list_root": "return os.listdir('/')",
    "list_here": "return os.listdir('.') is not None",
    "list_place": "return os.listdir(PLACE)",
    "list_files": "return os.listdir('/proc/self/fd')",
    "open_by_library": "return libc.open(b'/etc/passwd', 0) > 0",
    "openat2": """
        how = (ctypes.c_uint64 * 3)(0, 0, 0)
        return libc.syscall(437, -100, b'/etc/passwd', how, 24) > 0""",
    "io_uring": "return libc.syscall(425, 8, ctypes.create_string_buffer(256)) > 0",
    "write": "open(MADE, 'w').write('x'); return True",
    "write_here": "open('made', 'w').write('x'); return True",
    "write_tmp": "return tempfile.NamedTemporaryFile(delete=True).write(b'x')",
    "unnamed_file": "return os.open(PLACE, os.O_TMPFILE | os.O_RDWR)",
    "huge_file": "open(MADE, 'w').truncate(1 << 40); return True",
    "huge_file_in_memory": "os.truncate(os.memfd_create('x'), 1 << 40); return True",
    "input_grows": "os.truncate(0, 1 << 30); return True",
    "make_directory": "os.mkdir(MADE); return True",
    "make_pipe": "os.mkfifo(MADE); return True",
    "make_device": "os.mknod(MADE, 0o600 | 0o020000, os.makedev(1, 3)); return True",
    "symlink": "os.symlink('/etc', MADE); return os.listdir(MADE)",
    "link": "os.link(VICTIM, MADE); return True",
    "rename": "os.rename(VICTIM, MADE); return True",
    "remove": "os.remove(VICTIM); return True",
    "remove_tree": "shutil.rmtree(PLACE); return not os.path.exists(VICTIM)",
    "empty": "os.truncate(VICTIM, 0); return True",
    "append": "open(VICTIM, 'a').write('x'); return True",
    "permissions": "os.chmod(VICTIM, 0); return True",
    "owner": "os.chown(VICTIM, 0, 0); return True",
    "times": "os.utime(VICTIM, (0, 0)); return True",
    "attributes": "os.setxattr(VICTIM, 'user.x', b'x'); return True",
    "change_directory": "os.chdir('/'); return True",
    "change_root": "os.chroot('/'); return True",
    # Signals, and looking into others
    "signal_parent": "os.kill(os.getppid(), 0); return True",
    "signal_first": "os.kill(1, 0); return True",
    "signal_all": "os.kill(-1, 0); return True",
    "signal_group": "os.killpg(os.getpgid(os.getppid()), 0); return True",
    "signal_by_queue": "return libc.sigqueue(os.getppid(), 0, 0) == 0",
    "pidfd": "return os.pidfd_open(os.getppid())",
    "signal_by_owner": "fcntl.fcntl(0, fcntl.F_SETOWN, os.getppid()); return True",
    "trace_parent": "return libc.ptrace(0x4206, os.getppid(), 0, 0) == 0",
    "trace_me": "return libc.ptrace(0, 0, 0, 0) == 0",
    "read_process": """
        buffer = ctypes.create_string_buffer(8)
        local = (ctypes.c_size_t * 2)(ctypes.addressof(buffer), 8)
        remote = (ctypes.c_size_t * 2)(id(None), 8)
        return libc.process_vm_readv(os.getppid(), local, 1, remote, 1, 0) == 8""",
    # Limits and privileges
    "become_root": "os.setuid(0); return True",
    "become_root_again": "os.setresuid(0, 0, 0); return True",
    "groups": "os.setgroups([0]); return True",
    "niceness": "os.nice(-1); return True",
    "more_time": "resource.setrlimit(resource.RLIMIT_CPU, (9999, 9999)); return True",
    "more_memory": "resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40)); return True",
    "more_threads": "resource.setrlimit(resource.RLIMIT_NPROC, (9999, 9999)); return True",
    "more_files": "resource.setrlimit(resource.RLIMIT_NOFILE, (99, 99)); return True",
    "larger_files": "resource.setrlimit(resource.RLIMIT_FSIZE, (99, 99)); return True",
    "limits_of_parent": """
        return resource.prlimit(os.getppid(), resource.RLIMIT_CORE, (0, 0)) is not None""",
    "outlive_template": "return libc.prctl(1, 0, 0, 0, 0) == 0",
    "new_user_namespace": "return libc.unshare(0x10000000) == 0",
    "new_network_namespace": "return libc.unshare(0x40000000) == 0",
    "new_mount_namespace": "return libc.unshare(0x00020000) == 0",
    "join_namespace": "return libc.setns(0, 0) == 0",
    "mount": "return libc.mount(b'none', PLACE.encode(), b'tmpfs', 0, None) == 0",
    "bpf": "return libc.syscall(321, 0, ctypes.create_string_buffer(64), 64) > 0",
    "perf": """
        attributes = ctypes.create_string_buffer(128)
        attributes[4] = 128
        return libc.syscall(298, attributes, 0, -1, -1, 0) > 0""",
    "shared_memory": "return libc.shmget(0, 4096, 0o1600) >= 0",
    # Memory; never touched
    "memory": "return len(bytearray(20 << 30))",
    "memory_of_system": "return len(mmap.mmap(-1, 20 << 30))",
    "memory_of_numpy": "import numpy; return numpy.zeros(20 << 27).size",
    "memory_in_parts": "return len([mmap.mmap(-1, 1 << 28) for _ in range(40)])",
}

SEARCH = """
import collections, ctypes, gc, glob, os, re, sys
DATA = {data!r}
MARK = "zeb" "ra-"
def seen(text):
    if isinstance(text, bytes):
        text = text.decode("latin-1")
    found = re.search(MARK + "7[0-9]{{9}}", str(text))
    return found and found[0]
def files():
    return [*range(3, 16)]
def search():
{body}
found = ""
try:
    found = search() or ""
except BaseException as error:
    print(type(error), file=sys.stderr)
def f(x):
    return found
if __name__ == "__main__":
    print(found)
"""

# Function bodies that return the answer if they find it.
SEARCHES = {
    "data_file": "return seen(open(DATA).read())",
    "near_files": """
        for name in glob.glob('*') + glob.glob(os.path.dirname(DATA) + '/*') + glob.glob('/tmp/*'):
            if os.path.isfile(name) and seen(open(name, errors='replace').read()):
                return seen(open(name, errors='replace').read())""",
    "environment": "return seen([os.environ, sys.argv, sys.orig_argv])",
    "environment_of_library": """
        pointers = ctypes.POINTER(ctypes.c_char_p)
        names = ctypes.cast(ctypes.c_void_p.in_dll(ctypes.CDLL(None), 'environ'), pointers)
        for i in range(1000):
            if not names[i] or seen(names[i]):
                return seen(names[i])""",
    "start_of_the_stack": """
        libc = ctypes.CDLL(None)
        page = ctypes.c_void_p.in_dll(libc, 'program_invocation_name').value >> 12 << 12
        text = b''
        while libc.madvise(ctypes.c_void_p(page), 4096, 0) == 0:  # It is there.
            text, page = text + ctypes.string_at(page, 4096), page + 4096
        return seen(text)""",
    "frames": """
        frame = sys._getframe()
        while frame:
            for value in [*frame.f_locals.values(), *frame.f_globals.values()]:
                if seen(value):
                    return seen(value)
            frame = frame.f_back""",
    "objects": """
        for thing in gc.get_objects() + gc.get_referents(*gc.get_objects()):
            for value in gc.get_referents(thing):
                if isinstance(value, str | bytes) and seen(value):
                    return seen(value)""",
    "heap": """
        libc = ctypes.CDLL(None)
        libc.sbrk.restype = ctypes.c_void_p
        end = libc.sbrk(0)
        sizes = [bytearray(600) for _ in range(1000)]
        inside = [id(thing) for thing in sizes if end - (1 << 30) < id(thing) < end]
        buffers = [ctypes.addressof(ctypes.c_char.from_buffer(thing)) for thing in sizes]
        inside += [at for at in buffers if end - (1 << 30) < at < end]
        return seen(ctypes.string_at(min(inside), end - min(inside)))""",
    "arenas": """
        counts = collections.Counter(id(thing) >> 20 for thing in gc.get_objects())
        for arena, count in counts.items():
            if count > 500:
                text = ctypes.string_at(arena << 20, 1 << 20)
                if seen(text):
                    return seen(text)""",
    "calls": """
        for file in files():
            try:
                text = os.read(file, 1 << 16)
            except OSError:
                continue
            if seen(text):
                return seen(text)""",
    "text_again": """
        for file in files():
            try:
                text = os.pread(file, 1 << 16, 0)
            except OSError:
                continue
            if seen(text):
                return seen(text)""",
    "modules": """
        for module in list(sys.modules.values()):
            for value in list(vars(module).values()):
                if isinstance(value, str | bytes | list | dict) and seen(value):
                    return seen(value)""",
}

# Whole programs that do not know the answer.
PRETEND = {
    "exit_0": "import os\nos._exit(0)",
    "exit_in_f": "import os\ndef f(x): os._exit(0)",
    "sys_exit": "import sys\nsys.exit(0)",
    "sys_exit_in_f": "import sys\ndef f(x): sys.exit(0)",
    "quit": "quit()",
    "exit_at_exit": "import atexit, os\natexit.register(os._exit, 0)\ndef f(x): return 1",
    "exit_from_thread": """
import os, threading
threading.Thread(target=os._exit, args=[0]).start()
def f(x):
    while True: pass""",
    "equal_to_all": """
class Equal:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 0
    def __bool__(self): return True
    def __str__(self): return ""
def f(x): return Equal()
print(Equal())""",
    "equal_text": """
class Equal(str):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    __hash__ = str.__hash__
def f(x): return Equal("x")
print(Equal("x"))""",
    "equal_list": """
class Equal(list):
    def __eq__(self, other): return True
    def __len__(self): return 1
def f(x): return Equal()
print(Equal())""",
    "equal_number": """
class Equal(int):
    def __eq__(self, other): return True
    __hash__ = int.__hash__
def f(x): return Equal(5)
print(Equal(5))""",
    "equal_array": "import numpy\ndef f(x): return numpy.array(['x'] * 3)\nprint(f(3))",
    "endless_tolist": """
class Odd:
    def tolist(self): return Odd()
def f(x): return Odd()""",
    "patched_builtins": """
import builtins
builtins.AssertionError = Exception
builtins.isinstance = lambda *a: True
builtins.len = lambda x: 1
builtins.str = builtins.repr = lambda *a: ""
builtins.all = builtins.any = lambda *a: True
def f(x): return 1
print(1)""",
    "patched_json": """
import json
json.dumps = lambda *a, **k: '{"returned": true, "raised": null}'
json.JSONEncoder.encode = json.dumps
def f(x): return 1""",
    "patched_encoder": """
import sys
for name, module in list(sys.modules.items()):
    if "sandbox" in name:
        for key in list(vars(module)):
            if key[0] != "_":
                setattr(module, key, lambda *a, **k: True)
def f(x): return 1""",
    "patched_output": """
import sys
class Out:
    def write(self, text): return 0
    def flush(self): pass
sys.stdout = sys.__stdout__ = Out()
print("x")
def f(x): return 1""",
    "patched_exit": "import os\nos._exit = lambda code: None\ndef f(x): raise SystemExit(0)",
    "patched_tests": """
import unittest, operator
unittest.TestCase.assertEqual = lambda *a: None
operator.eq = lambda a, b: True
def check(candidate): pass
def candidate(x): pass
def f(x): return None""",
    "trace": """
import sys
def trace(frame, event, argument):
    frame.f_trace_lines = True
    return trace
sys.settrace(trace)
def f(x): return None""",
    "passed_in_each_file": """
import os
for file in range(1, 16):
    try: os.write(file, b"passed")
    except OSError: pass
os._exit(0)""",
    "replies_in_each_file": """
import os
for text in (b'{"returned": true}\\n', b'{"returned": null}\\n', b'passed\\n', b'\\x00\\n'):
    for file in range(1, 16):
        try: os.write(file, text)
        except OSError: pass
os._exit(0)""",
    "reply_before_the_call": """
import os
try: os.write(5, b'{"returned": {"set": [true]}}\\n' * 100)
except OSError: pass
def f(x): return None""",
    "odd_replies": """
import os
odd = b'{"returned": {"range": [0, 1, 0]}}'
for text in (b'[]', b'5', b'{}', odd, b'[' * 100000, b'1' * 99999):
    try: os.write(5, text + b'\\n')
    except OSError: pass
os._exit(0)""",
    "equal_hashes": """
import os
numbers = [k * (2**61 - 1) for k in range(45000)]
os.write(5, f'{{"returned": {{"set": {numbers}}}}}\\n'.encode())
os._exit(0)""",
    "equal_keys": """
import os
pairs = [[k * (2**61 - 1), 0] for k in range(38000)]
os.write(5, f'{{"returned": {{"dict": {pairs}}}}}\\n'.encode())
os._exit(0)""",
    "files_closed": "import os\nos.closerange(0, 99)\ndef f(x): return None",
    "files_moved": "import os\nfor i in range(3, 9):\n    os.dup2(1, i)\ndef f(x): return None",
    "result_as_type": "def f(x): return type('x', (), {'__eq__': lambda *a: True})",
    "recursive_list": "x = []\nx.append(x)\ndef f(_): return x\nprint(x)",
    "deep_list": "x = []\nfor _ in range(10**5): x = [x]\ndef f(_): return x",
    "endless_iterator": "import itertools\ndef f(x): return itertools.count()",
    "large_number": """
import sys
sys.set_int_max_str_digits(0)
def f(x): return 10**300000
print(f(1))""",
    "not_a_number": "def f(x): return float('nan')\nprint(f(1))",
    "all_guesses": f"def f(x): return [f'{MARK}{{i}}' for i in range(999)]\nprint(*f(1))",
    "input_again": "def f(x): return x\ntry: print(input())\nexcept EOFError: pass",
    "nothing": "def f(x): pass",
    "raises": "def f(x): raise AssertionError\nraise_it = f\nprint()",
    "no_function": "g = 1",
    "no_python": "def f(x) return 1",
    "null_bytes": "def f(x): return 1 \0",
    "half_a_pair": "f = lambda x: '\ud800'\nprint('\ud800')",
    "solution_imports": "from solution import *\nfrom test import *\nimport __main__\n",
    "crash": "import ctypes\nctypes.string_at(0)",
    "abort": "import os\nos.abort()",
    "stack": """
import sys
sys.setrecursionlimit(10**9)
class A:
    def __getattr__(self, name): return getattr(self, name + "x")
def f(x): return A().y
if __name__ == "__main__": f(3)""",
    "bad_frees": "import ctypes\nctypes.CDLL(None).free(ctypes.c_void_p(12345))",
    "kept_stack": "def g(n): return g(n + 1)\ndef f(x): return g(0)\nprint(f(1))",
}

# Whole programs that never end by themselves, or not for long. They take their limit.
HANG = {
    "sleep": "import time\ntime.sleep(40)",
    "sleep_in_f": "import time\ndef f(x): time.sleep(40)\nif __name__ == '__main__': f(3)",
    "busy": "import time\nend = time.time() + 40\nwhile time.time() < end: pass",
    "signals_ignored": """
import signal, time
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
end = time.time() + 40
while time.time() < end: pass""",
    "signals_blocked": """
import signal, time
signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
time.sleep(40)""",
    "exceptions_swallowed": """
import time
end = time.time() + 40
while time.time() < end:
    try:
        while time.time() < end: pass
    except BaseException: pass""",
    "busy_threads": """
import threading, time
end = time.time() + 40
def work():
    while time.time() < end: pass
for _ in range(8): threading.Thread(target=work).start()""",
    "waiting_threads": """
import threading, time
for _ in range(8): threading.Thread(target=time.sleep, args=[40]).start()""",
    "files_closed_and_asleep": "import os, time\nos.closerange(0, 99)\ntime.sleep(40)",
    "endless_output": "for _ in range(10**6): print('x' * 1000)",
    "endless_errors": "import sys\nfor _ in range(10**6): print('x' * 1000, file=sys.stderr)",
    "endless_memory": """
parts = []
for _ in range(40): parts.append(bytearray(b'x') * (1 << 24))
import time
time.sleep(40)""",
    "long_expression": "import re\nre.match('(a+)+b', 'a' * 40)",
    "large_power": "x = 9 ** 9 ** 9",
    "deadlock": "import threading\nx = threading.Lock()\nx.acquire()\nx.acquire(timeout=40)",
    "at_exit": "import atexit, time\natexit.register(time.sleep, 40)\ndef f(x): time.sleep(40)",
    "in_a_finalizer": """
import time
class A:
    def __del__(self): time.sleep(40)
a = A()
del a""",
    "long_compile": f"y = [{'[1],' * 300000}]\nimport time\ntime.sleep(40)",
}


ENDLESS = {*HANG, "calls", "endless_iterator", "large_number", "stack"}
"""Those that may take their whole limit."""

RIGHT = "def f(x): return {answer!r}\nif __name__ == '__main__': print(f(3))"
RESPONSES = {
    "unfenced": "```python\n{program}\n",
    "text_alone": "{program}",
    "before_another": "```python\n{program}\n```\nor\n```python\nprint('lost')\n```",
}
"""Name -> a response in which the right program does not count."""


def columns(shape: str, answer: str) -> dict:
    """The columns of a row whose answer to the input 3 is this."""
    return {
        "script": {"input_output": {"inputs": ["3\n"], "outputs": [answer + "\n"]}},
        "call": {"input_output": {"inputs": [[3]], "outputs": [answer], "fn_name": "f"}},
        "asserts": {"test_list": [f"assert f(3) == {answer!r}"]},
    }[shape]


def fenced(program: str) -> str:
    """A response of one program."""
    return f"Here it is.\n```python\n{program}\n```"


def hostile_programs(
    answer: str, place: str, data: str, seed: int = 0
) -> list[tuple[str, str, str]]:
    """(kind, shape, response): each kind once for each shape in which it differs.

    Args:
        answer: MARK, 7 and nine digits.
        place: a directory that all may write to, with a file `victim`.
        data: a readable file with the answer.
        seed: of the order.
    """
    corpus = []

    def filled(template: str, body: str) -> str:
        body = textwrap.indent(textwrap.dedent(body.strip("\n")), "    ")
        return fenced(template.format(place=place, data=data, answer=answer, body=body))

    for i, (kind, body) in enumerate(ATTEMPTS.items()):
        corpus.append((kind, SHAPES[i % 3], filled(ATTEMPT, body)))
    for i, (kind, program) in enumerate(HANG.items()):
        corpus.append((kind, SHAPES[i % 3], fenced(program)))
    for shape in SHAPES:
        corpus += [(kind, shape, filled(SEARCH, body)) for kind, body in SEARCHES.items()]
        corpus += [(kind, shape, fenced(program)) for kind, program in PRETEND.items()]
        right = RIGHT.format(answer=answer)
        corpus += [(kind, shape, r.format(program=right)) for kind, r in RESPONSES.items()]
    random.Random(seed).shuffle(corpus)
    return corpus
