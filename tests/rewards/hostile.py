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
        import sys
        for module in [sys.modules[name] for name in ('__main__', 'jail', 'confinement')]:
            module.pack = lambda *_: True
            module.run_judge = module.confine = lambda *_: None
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

# (the layers of which any refuses it, the program); each returns True where it succeeds. pid is a process of the same
# user, path a file outside the folder, port one where the test listens. 'landlock 4' is its version 4 or a later one;
# 'root' and 'ordinary' are users: rights that root drops are refused to it, and a limit on processes binds others alone

ATTACKS = {
    'reads the environment': (
        {'landlock 1', 'namespaces', 'root'},
        """
        def attack(pid, path, port): return b'SECRET=hidden' in open(f'/proc/{pid}/environ', 'rb').read()""",
    ),
    'reads memory': (
        {'landlock 1', 'namespaces', 'root'},
        """
        def attack(pid, path, port):
            start = int(next(line for line in open(f'/proc/{pid}/maps') if ' rw-p ' in line).split('-')[0], 16)
            memory = open(f'/proc/{pid}/mem', 'rb')
            memory.seek(start)
            return len(memory.read(64)) == 64""",
    ),
    'reads memory by a call': (
        {'landlock 1', 'namespaces', 'root', 'system calls'},
        """
        import ctypes
        def attack(pid, path, port):
            place, libc = (ctypes.c_void_p * 2)(4096, 1), ctypes.CDLL(None, use_errno=True)
            return libc.process_vm_readv(pid, place, 1, place, 1, 0) == -1 and ctypes.get_errno() == 14  # no page""",
    ),
    'reads a file': (
        {'landlock 1', 'own root'},
        """
        def attack(pid, path, port): return open(path).read() == 'untouched'""",
    ),
    'lists a folder': (
        {'landlock 1', 'own root'},
        """
        import os
        def attack(pid, path, port): return bool(os.listdir(os.path.dirname(path)))""",
    ),
    'kills': (
        {'system calls', 'namespaces', 'landlock 6'},
        """
        import os
        def attack(pid, path, port):
            os.kill(pid, 0)
            return True""",
    ),
    'kills its judge': (
        {'system calls', 'landlock 6'},
        """
        import os
        def attack(pid, path, port):
            for near in (os.getppid(), *range(os.getpid() + 1, os.getpid() + 9)):
                try: return os.kill(near, 0) is None
                except OSError: pass""",
    ),
    'signals by input': (
        {'system calls', 'namespaces', 'landlock 6'},
        """
        import fcntl, os
        def attack(pid, path, port):  # the end of pid tells
            read, write = os.pipe()
            fcntl.fcntl(read, fcntl.F_SETOWN, pid)
            fcntl.fcntl(read, fcntl.F_SETFL, os.O_ASYNC)
            os.write(write, b'x')""",
    ),
    'limits another process': (
        {'system calls', 'namespaces'},
        """
        import resource
        def attack(pid, path, port):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, resource.prlimit(pid, resource.RLIMIT_NOFILE))
            return True""",
    ),
    'connects': (
        {'system calls', 'namespaces', 'landlock 4'},
        """
        import socket
        def attack(pid, path, port): return socket.socket().connect(('127.0.0.1', port)) is None""",
    ),
    'listens': (
        {'system calls', 'namespaces', 'landlock 4'},
        """
        import socket
        def attack(pid, path, port):
            server = socket.socket()
            server.bind(('127.0.0.1', 0))
            try: socket.socket().connect(('127.0.0.1', port))  # the network of all
            finally: server.close()
            return True""",
    ),
    'sends a datagram': (
        {'system calls', 'namespaces'},
        """
        import socket
        def attack(pid, path, port):
            return socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', port)) == 1""",
    ),
    'connects to a local socket': (
        {'system calls', 'own root'},
        """
        import socket
        def attack(pid, path, port): return socket.socket(socket.AF_UNIX).connect(path + '.socket') is None""",
    ),
    'connects to a local socket without a file': (
        {'system calls', 'namespaces', 'landlock 6'},
        """
        import socket
        def attack(pid, path, port): return socket.socket(socket.AF_UNIX).connect('\\0' + path) is None""",
    ),
    'forks': (
        {'system calls', 'ordinary'},
        """
        import os
        def attack(pid, path, port): return bool(os.fork() or os._exit(0))""",
    ),
    'forks by the library': (
        {'system calls', 'ordinary'},
        """
        import ctypes, os
        def attack(pid, path, port): return ctypes.CDLL(None).fork() > 0 and bool(os.wait()) or os._exit(0)""",
    ),
    'starts a program': (
        {'system calls', 'ordinary', 'own root', 'landlock 1'},
        """
        import subprocess
        def attack(pid, path, port): return subprocess.run(['/bin/sh', '-c', '']).returncode == 0""",
    ),
    'writes a file': (
        {'system calls', 'own root', 'landlock 1'},
        """
        def attack(pid, path, port): return bool(open(path, 'a'))""",
    ),
    'makes a file': (
        {'system calls', 'own root', 'landlock 1'},
        """
        def attack(pid, path, port): return bool(open(path + '.new', 'x'))""",
    ),
    'makes a folder': (
        {'system calls', 'own root', 'landlock 1'},
        """
        import os
        def attack(pid, path, port): return not os.mkdir(path + '.folder')""",
    ),
    'links a file': (
        {'system calls', 'own root', 'landlock 1'},
        """
        import os
        def attack(pid, path, port): return not os.link(path, path + '.link')""",
    ),
    'truncates a file': (
        {'system calls', 'own root', 'landlock 3'},
        """
        import os
        def attack(pid, path, port): return os.truncate(path, 4) is None""",
    ),
    'opens a file to be read, and empties it': (
        {'system calls', 'own root', 'landlock 3'},
        """
        import os
        def attack(pid, path, port): return bool(os.open(path, os.O_RDONLY | os.O_TRUNC))""",
    ),
    'changes rights': (
        {'system calls', 'own root'},
        """
        import os
        def attack(pid, path, port): return not os.chmod(path, 0o600)""",
    ),
    'changes times': (
        {'system calls', 'own root'},
        """
        import os
        def attack(pid, path, port): return not os.utime(path, (1, 1))""",
    ),
    'renames a file': (
        {'system calls', 'own root', 'landlock 1'},
        """
        import os
        def attack(pid, path, port): return not os.rename(path, path + '.renamed')""",
    ),
    'deletes a file': (
        {'system calls', 'own root', 'landlock 1'},
        """
        import os
        def attack(pid, path, port): return not os.unlink(path)""",
    ),
    'has an environment': (
        {'limits'},
        """
        import os
        def attack(pid, path, port): return bool(os.environ)""",
    ),
    'has descriptors': (
        {'limits'},
        """
        import os
        def attack(pid, path, port):
            seen = []
            for fd in range(3, 64):
                try: seen.append(os.fstat(fd))
                except OSError: pass
            return len(seen) > 2""",
    ),
}

# tries to change the file, and its folder, by every combination of the flags of open, and by other ways to open
OPENS = """
    import ctypes, functools, itertools, operator, os, struct
    FLAGS = 'CREAT EXCL TRUNC APPEND NONBLOCK DIRECTORY NOFOLLOW TMPFILE PATH'.split()
    def attempt(action, *args):
        try: return action(*args)
        except OSError: return None
    def attack(path):
        libc, opened = ctypes.CDLL(None), 0
        flags = [getattr(os, 'O_' + name) for name in FLAGS]
        for mode in range(4):
            for chosen in itertools.product(*((0, flag) for flag in flags)):
                how = functools.reduce(operator.or_, chosen, mode)
                for target in (path, os.path.dirname(path)):
                    for fd in (attempt(os.open, target, how), libc.openat(-100, target.encode(), how, 0o600),
                               libc.syscall(437, -100, target.encode(), struct.pack('3Q', how, 0, 0), 24)):
                        if fd is not None and fd >= 0:
                            opened += 1
                            attempt(os.write, fd, b'x')
                            attempt(os.ftruncate, fd, 0)
                            os.close(fd)
        attempt(os.truncate, path, 0)
        libc.creat(path.encode(), 0o600)
        return opened
    """

# returns True where it sees into another process of the sandbox
READS_JUDGE = """
    import os
    def attack(pid, path, port):
        seen = 0
        for pid in filter(str.isdigit, os.listdir('/proc')):
            try: seen += os.getcwd() in open(f'/proc/{pid}/cmdline').read() and bool(open(f'/proc/{pid}/maps').read())
            except OSError: pass
        return seen > 1  # itself
    """
