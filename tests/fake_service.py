"""A local service of OpenAI's kind, and one of rewards, that fails in the ways that real ones do."""

from collections import Counter
import contextlib
import http.server
import json
import threading
import time
import zlib


class Service(http.server.ThreadingHTTPServer):
    """Grades a completion by the number with which it begins; `ways` says how its first requests fail.

    ways: completion -> [way, ...], one a request; then it is graded. default: the way of all others; together: so many
    requests must be there before one is answered.
    """

    daemon_threads, request_queue_size = True, 512

    def __init__(self, ways=None, default='grade', port=0, seconds=0.0, together=0):
        super().__init__(('127.0.0.1', port), Handler)
        self.ways, self.default, self.seconds = (
            {text: list(each) for text, each in (ways or {}).items()},
            default,
            seconds,
        )
        self.together = together
        self.lock, self.asked, self.answered = threading.Lock(), Counter(), Counter()
        self.bodies, self.keys, self.paths, self.moments = [], set(), set(), []
        self.now = self.most = 0  # requests under way; the most at once
        self.released = threading.Event()

    @property
    def url(self):
        return f'http://127.0.0.1:{self.server_port}/v1/chat/completions'

    def handle_error(self, request, client_address):
        pass  # a client that leaves in mid-answer


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'
    server: Service

    def do_POST(self):
        service = self.server
        body = json.loads(self.rfile.read(int(self.headers['Content-Length'])))
        batch = body.get('completions')
        texts = batch or [body['messages'][-1]['content'].partition('Solution: ')[2]]
        with service.lock:
            service.now += 1
            service.most = max(service.most, service.now)
            service.asked.update(texts)
            service.bodies.append(body)
            service.moments.append(time.monotonic())
            service.keys.add(self.headers['Authorization'])
            service.paths.add(self.path)
            ways = [service.ways[text].pop(0) if service.ways.get(text) else service.default for text in texts]
            if service.default == 'flaky':  # on some texts of any kind
                ways = ['status 500' if zlib.crc32(text.encode()) % 5 == 0 else 'hash' for text in texts]
        try:
            time.sleep(service.seconds)
            while service.most < service.together and not service.released.wait(0.01):
                pass
            way = next((way for way in ways if way != 'grade'), 'grade')
            with contextlib.suppress(OSError):  # the client has left
                self.answer(way, texts, batch is not None)
                with service.lock:
                    service.answered.update(texts if way == 'grade' else ())
        finally:
            with service.lock:
                service.now -= 1

    def answer(self, way, texts, batch):
        kind, _, value = way.partition(' ')
        if kind == 'grade':
            grades = [float(text.split()[0]) if text.split()[0] != 'null' else None for text in texts]
            if batch:
                self.send(200, json.dumps({'rewards': grades}))
            else:
                self.send_chat(f'Reasoned.\nScore: {grades[0]:g}')
        elif kind == 'hash':
            grades = [zlib.crc32(text.encode()) % 11 for text in texts]
            self.send(200, json.dumps({'rewards': grades})) if batch else self.send_chat(str(grades[0]))
        elif kind == 'says':
            self.send_chat(value)
        elif kind == 'raw':
            self.send(200, value)
        elif kind == 'status':
            status, _, after = value.partition(' ')
            self.send(
                int(status), f'{{"error": "{self.headers["Authorization"]}"}}', {'Retry-After': after} if after else {}
            )
        elif kind == 'redirect':
            self.send(307, '', {'Location': f'http://127.0.0.1:{self.server.server_port}/elsewhere'})
        elif kind == 'hang':
            self.server.released.wait(60)
            self.close_connection = True
        elif kind == 'drop':
            self.close_connection = True
        elif kind == 'die':
            self.start(200, 1000)
            self.wfile.write(b'{"choices": [')
            self.wfile.flush()
            self.close_connection = True
        elif kind == 'break':
            self.wfile.write(b'HTTP/1.1 200 OK\r\n\r\n{"choices": [')
            self.close_connection = True
        elif kind == 'drip':
            self.start(200, 10**6)
            while not self.server.released.wait(0.05):
                self.wfile.write(b' ')
        elif kind == 'drip_headers':
            self.wfile.write(b'HTTP/1.1 200 OK\r\n')
            while not self.server.released.wait(0.05):
                self.wfile.write(b'X: ')
        elif kind == 'flood':
            self.start(200, 10**12)
            while not self.server.released.is_set():
                self.wfile.write(b' ' * 2**20)
                self.server.flooded = getattr(self.server, 'flooded', 0) + 2**20
        else:
            raise AssertionError(way)

    def send_chat(self, content, **choice):
        message = {'choices': [{'message': {'content': content}} | choice]}
        self.send(200, json.dumps(message | {'usage': {'prompt_tokens': 1000, 'completion_tokens': 500}}))

    def start(self, status, length, headers=()):
        self.send_response(status)
        self.send_header('Content-Length', str(length))
        for name, value in dict(headers).items():
            self.send_header(name, value)
        self.end_headers()

    def send(self, status, text, headers=()):
        content = text.encode()
        self.start(status, len(content), headers)
        self.wfile.write(content)

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def serving(*args, **options):
    """A Service in a thread, which ends with the context; what hangs is released."""
    with Service(*args, **options) as service:
        threading.Thread(target=service.serve_forever, args=[0.02], daemon=True).start()
        try:
            yield service
        finally:
            service.released.set()
            service.shutdown()
