"""The modules of the standard library that programs can import: docs/reward.md has the same list.

With a module come those that it imports itself. All that have a public name are listed, so that
what a program can import does not depend on the version of Python.
"""

STANDARD_MODULES = """
abc argparse array ast asyncio atexit base64 bdb binascii bisect builtins bz2 cProfile calendar
cmath cmd code codecs codeop collections collections.abc colorsys concurrent.futures
concurrent.futures.thread configparser contextlib contextvars copy copyreg csv ctypes dataclasses
datetime decimal difflib dis doctest encodings.ascii encodings.cp1252 encodings.cp437
encodings.hex_codec encodings.idna encodings.latin_1 encodings.rot_13 encodings.unicode_escape
encodings.utf_16 encodings.utf_16_le encodings.utf_32 encodings.utf_8_sig enum errno faulthandler
fcntl fileinput fnmatch fractions functools gc genericpath getopt gettext glob graphlib gzip
hashlib heapq hmac html html.parser importlib inspect io ipaddress itertools json keyword
linecache locale logging lzma marshal math mmap ntpath numbers opcode operator optparse os os.path
pathlib pdb pickle pkgutil platform posix posixpath pprint profile pstats pwd pyexpat queue random
re reprlib resource sched secrets select selectors shlex shutil signal site socket ssl stat
statistics string stringprep struct subprocess sys sysconfig tempfile textwrap threading time
timeit token tokenize tomllib traceback tracemalloc types typing unicodedata unittest
unittest.mock urllib.parse uuid warnings weakref xml.etree.ElementTree zipfile zipimport zlib
zoneinfo __future__ _pylong _strptime
""".split()
"""Loaded beforehand: a confined process opens no file, and so imports no other module."""
