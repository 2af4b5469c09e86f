"""Programs that do not end, break, cheat, or reach for what is not theirs."""

STOPPED = {
    'loop': 'while True: pass',
    'loop in a call': 'def f(x):\n    while True: pass',
    'sleep': 'import time\ntime.sleep(1000)',
    'one long operation': 'def f(x): return 9 ** 9 ** 9',
    'catches everything': """
        import signal
        for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(number, signal.SIG_IGN)
        while True:
            try:
                while True: pass
            except BaseException: pass
        """,
    'output for ever': 'while True: print("x" * 2 ** 20)',
    'trace function': """
        import sys
        def trace(*_):
            while True: pass
        sys.settrace(trace)
        def f(x): return x * x
        """,
}
ENDED = {
    'exit': 'import sys\nsys.exit(0)',
    'exit in a call': 'def f(x): raise SystemExit(0)',
    'hard exit': 'import os\nos._exit(0)',
    'hard exit in a call': 'import os\ndef f(x): os._exit(0)',
    'interrupt': 'raise KeyboardInterrupt',
    'crash': 'import ctypes\nctypes.string_at(0)',
    'abort': 'import os\ndef f(x): os.abort()',
    'recursion': 'def f(x): return f(x)',
    'recursion without limit': 'import sys\nsys.setrecursionlimit(2 ** 30)\ndef f(x): return list(map(f, [x]))',
    '10 GB': 'def f(x): return x * x if bytearray(10 * 2 ** 30) else 0',
    'memory in small pieces': 'kept = []\nwhile True: kept.append(bytearray(2 ** 20))',
    'threads': 'import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(1000,)).start()',
    'long answer': 'def f(x): return "x" * 2 ** 25',
    'long number': 'def f(x): return 10 ** 10000',
    'deep answer': 'def f(x):\n    x = []\n    for _ in range(10 ** 5): x = [x]\n    return x',
    'own answer': 'def f(x):\n    x = []\n    x.append(x)\n    return x',
    'nested source': '(' * 10**5,
    'signs': 'f = ' + '-' * 10**6 + '1',
    'digits': 'f = ' + '9' * 10**6,
    'huge file': 'open("file", "wb").write(bytes(100 * 2 ** 20))\ndef f(x): return x * x',
    'many files': 'for n in range(10 ** 4): open(str(n), "w").write("x" * 10 ** 4)',
    'deep folders': 'import os\nfor _ in range(1100):\n    os.mkdir("folder")\n    os.chdir("folder")',
    'closed folder': 'import os\nos.mkdir("folder", 0)\nos.mkdir("other")\nopen("other/file", "w")',
    'deletes its folder': """
        import os, shutil
        here = os.getcwd()
        open('file', 'w')
        shutil.rmtree(here, ignore_errors=True)
        os.rmdir(here)
        """,
    'fork bomb': """
        import os, time
        for _ in range(5): os.fork()
        time.sleep(1000)
        """,
    'daemon': """
        import os, time
        if not os.fork():
            os.setsid()
            if os.fork(): os._exit(0)
            time.sleep(1000)
        """,
    'other program': """
        import os, subprocess, sys
        subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)', os.getcwd()], start_new_session=True)
        """,
}

# that try to pass without being right
CHEATS = {
    'equal to everything': """
        class Equal(int):
            __eq__ = __le__ = __ge__ = lambda *_: True
            __ne__ = lambda *_: False
            __hash__ = lambda _: 4
        def f(x): return Equal(0)
        """,
    'equal to everything, no number': """
        class Equal:
            __eq__ = lambda *_: True
            __ne__ = lambda *_: False
            __bool__ = lambda _: True
        def f(x): return Equal()
        """,
    'no more errors': """
        import builtins, sys
        builtins.AssertionError = type('Quiet', (BaseException,), {})
        builtins.exec = builtins.compile = lambda *_: None
        sys.excepthook = lambda *_: None
        def f(x): return 0
        """,
    'another checker': """
        import __main__
        __main__.pack = lambda *_: True
        __main__.run_judge = __main__.confine = lambda *_: None
        def f(x): return 0
        """,
    'another json': """
        import json
        json.dumps = lambda *_: '{"value": true}'
        def f(x): return 0
        """,
    'success on every descriptor': r"""
        import os
        for fd in range(64):
            for text in (b'11', b'11\n', b'{"passed": "11", "expired": false}\n', b'{"value": true}\n' * 9):
                try: os.write(fd, text)
                except OSError: pass
        os._exit(0)
        """,
    'endless answer': """
        import os
        while True:
            for fd in range(3, 64):
                try: os.write(fd, b'1' * 4096)
                except OSError: pass
        """,
    'searches for the tests': """
        import ctypes, gc, sys
        def f(x):
            seen = [v for o in gc.get_objects() for v in gc.get_referents(o) if isinstance(v, (str, bytes))]
            frame = sys._getframe()
            while frame:
                seen += frame.f_locals.values()
                frame = frame.f_back
            for text in seen:
                if isinstance(text, str) and 'assert' + ' f(' in text:
                    return int(text.split('f(' + str(x) + ') == ')[1][:5])
        """,
}

# (the layer that refuses it, the program); each returns True where it succeeds; pid is a process of the same user, path
# a file outside the folder

ATTACKS = {
    'reads the environment': (
        'landlock',
        """
        def attack(pid, path): return b'SECRET=hidden' in open(f'/proc/{pid}/environ', 'rb').read()""",
    ),
    'reads memory': (
        'landlock',
        """
        def attack(pid, path):
            start = int(next(line for line in open(f'/proc/{pid}/maps') if '[heap]' in line).split('-')[0], 16)
            memory = open(f'/proc/{pid}/mem', 'rb')
            memory.seek(start)
            return len(memory.read(64)) == 64""",
    ),
    'reads memory by a call': (
        'system calls',
        """
        import ctypes
        def attack(pid, path):
            place, libc = (ctypes.c_void_p * 2)(4096, 1), ctypes.CDLL(None, use_errno=True)
            return libc.process_vm_readv(pid, place, 1, place, 1, 0) == -1 and ctypes.get_errno() == 14  # no page""",
    ),
    'reads a file': (
        'landlock',
        """
        def attack(pid, path): return open(path).read() == 'untouched'""",
    ),
    'lists a folder': (
        'landlock',
        """
        import os
        def attack(pid, path): return bool(os.listdir(os.path.dirname(path)))""",
    ),
    'kills': (
        'system calls',
        """
        import os
        def attack(pid, path):
            os.kill(pid, 0)
            return True""",
    ),
    'kills its judge': (
        'system calls',
        """
        import os
        def attack(pid, path):
            os.kill(os.getpid(), 0)
            return True""",
    ),
    'signals by input': (
        'system calls',
        """
        import fcntl, os
        def attack(pid, path): return fcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, os.getpid()) == 0""",
    ),
    'limits another process': (
        'system calls',
        """
        import resource
        def attack(pid, path):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, resource.prlimit(pid, resource.RLIMIT_NOFILE))
            return True""",
    ),
    'opens a socket': (
        'system calls',
        """
        import socket
        def attack(pid, path): return bool(socket.socket())""",
    ),
    'opens a local socket': (
        'system calls',
        """
        import socket
        def attack(pid, path): return bool(socket.socket(socket.AF_UNIX)) and bool(socket.socketpair())""",
    ),
    'forks': (
        'system calls',
        """
        import os
        def attack(pid, path): return bool(os.fork() or os._exit(0))""",
    ),
    'forks by the library': (
        'system calls',
        """
        import ctypes, os
        def attack(pid, path): return bool(ctypes.CDLL(None).fork() or os._exit(0)) and bool(1 + os.wait()[0])""",
    ),
    'starts a program': (
        'system calls',
        """
        import subprocess, sys
        def attack(pid, path): return subprocess.run([sys.executable, '-c', '']).returncode == 0""",
    ),
    'writes a file': (
        'system calls',
        """
        def attack(pid, path): return bool(open(path, 'a'))""",
    ),
    'makes a file': (
        'system calls',
        """
        def attack(pid, path): return bool(open(path + '.new', 'x'))""",
    ),
    'makes a folder': (
        'system calls',
        """
        import os
        def attack(pid, path): return not os.mkdir(path + '.folder')""",
    ),
    'links a file': (
        'system calls',
        """
        import os
        def attack(pid, path): return not os.link(path, path + '.link')""",
    ),
    'changes rights': (
        'system calls',
        """
        import os
        def attack(pid, path): return not os.chmod(path, 0o600)""",
    ),
    'changes times': (
        'system calls',
        """
        import os
        def attack(pid, path): return not os.utime(path, (1, 1))""",
    ),
    'renames a file': (
        'system calls',
        """
        import os
        def attack(pid, path): return not os.rename(path, path + '.renamed')""",
    ),
    'deletes a file': (
        'system calls',
        """
        import os
        def attack(pid, path): return not os.unlink(path)""",
    ),
    'has an environment': (
        'limits',
        """
        import os
        def attack(pid, path): return bool(os.environ)""",
    ),
    'has descriptors': (
        'limits',
        """
        import os
        def attack(pid, path):
            found = []
            for fd in range(3, 64):
                try: found.append(os.fstat(fd))
                except OSError: pass
            return len(found) > 2""",
    ),
}

# returns True where it sees into another process of the sandbox
READS_JUDGE = """
    import os
    def attack(pid, path):
        seen = 0
        for pid in filter(str.isdigit, os.listdir('/proc')):
            try: seen += os.getcwd() in open(f'/proc/{pid}/cmdline').read() and bool(open(f'/proc/{pid}/maps').read())
            except OSError: pass
        return seen > 1  # itself
    """
