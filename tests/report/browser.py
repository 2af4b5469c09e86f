"""A headless Chromium that is driven through its debugging pipe, with the standard library alone."""

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time

NAMES = ('chromium', 'chromium-browser', 'google-chrome', 'google-chrome-stable', 'chrome')
FLAGS = (
    *('--headless=new', '--no-sandbox', '--disable-gpu', '--hide-scrollbars', '--remote-debugging-pipe'),
    *('--no-first-run', '--disable-extensions', '--disable-background-networking', '--disable-component-update'),
)


def executable():
    """The path of a Chromium; None where there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Chromium:
    """A browser process; `open` opens a page in it."""

    def __init__(self):
        self._profile = tempfile.mkdtemp(prefix='chromium-')
        (theirs_in, self._out), (self._in, theirs_out) = os.pipe(), os.pipe()
        # the pipe's ends have the numbers 3 and 4 there; a shell gives them these, for a function of ours would fork
        command = ['bash', '-c', f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', 'bash', executable(), *FLAGS]
        command += [f'--user-data-dir={self._profile}']
        quiet = dict(stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._process = subprocess.Popen(command, pass_fds=(theirs_in, theirs_out), **quiet)
        for end in (theirs_in, theirs_out):
            os.close(end)
        self._rest, self._number, self.events = b'', 0, []

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._process.kill()
        self._process.wait()
        for end in (self._in, self._out):
            os.close(end)
        shutil.rmtree(self._profile, ignore_errors=True)

    def call(self, method, session=None, **params):
        """The result of a method of the debugging protocol; what happens meanwhile is put into events."""
        self._number += 1
        message = {'id': self._number, 'method': method, 'params': params} | ({'sessionId': session} if session else {})
        os.write(self._out, json.dumps(message).encode() + b'\0')
        while (answer := self._receive(30)).get('id') != self._number:
            self.events.append(answer)
        if 'error' in answer:
            raise RuntimeError(f'{method}: {answer["error"]}')
        return answer['result']

    def wait_for(self, method, session):
        """Waits for an event of a page, which may have come already."""
        while not any(x.get('method') == method and x.get('sessionId') == session for x in self.events):
            self.events.append(self._receive(30))

    def _receive(self, seconds):
        end = time.monotonic() + seconds
        while b'\0' not in self._rest:
            if not select.select([self._in], [], [], max(0, end - time.monotonic()))[0]:
                raise TimeoutError('the browser says nothing')
            self._rest += os.read(self._in, 1 << 20)
        line, _, self._rest = self._rest.partition(b'\0')
        return json.loads(line)

    def open(self, path, width=1280, height=900, dark=False):
        """A Page of a file."""
        return Page(self, path, width, height, dark)


class Page:
    """An open page."""

    def __init__(self, browser, path, width, height, dark):
        browser.events.clear()
        self._browser = browser
        target = browser.call('Target.createTarget', url='about:blank')['targetId']
        self._session = browser.call('Target.attachToTarget', targetId=target, flatten=True)['sessionId']
        for domain in ('Page', 'Runtime', 'Network', 'Log'):
            self.call(f'{domain}.enable')
        self.call(
            'Emulation.setDeviceMetricsOverride', width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {'name': 'prefers-color-scheme', 'value': 'dark' if dark else 'light'}
        self.call('Emulation.setEmulatedMedia', features=[scheme])
        self.call('Page.navigate', url=f'file://{path}')
        browser.wait_for('Page.loadEventFired', self._session)
        self.settle()

    def call(self, method, **params):
        return self._browser.call(method, self._session, **params)

    def settle(self):
        """Waits for the rollouts, and for two frames."""
        frames = 'new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))'
        self.evaluate(f'Promise.resolve(Report.ready).then(() => {frames}).then(() => null)')

    def evaluate(self, script):
        """The value of a JavaScript expression in the page, of a promise what it gives."""
        answer = self.call('Runtime.evaluate', expression=script, awaitPromise=True, returnByValue=True)
        if 'exceptionDetails' in answer:
            raise RuntimeError(answer['exceptionDetails'])
        return answer['result'].get('value')

    def problems(self):
        """What the console has said, and what was thrown."""
        kinds = (
            'Runtime.consoleAPICalled',
            'Runtime.exceptionThrown',
            'Log.entryAdded',
            'Page.javascriptDialogOpening',
        )
        return [event['params'] for event in self._events() if event['method'] in kinds]

    def requests(self):
        """The addresses that were asked for, except for the page itself and data: addresses."""
        sent = [e['params']['request']['url'] for e in self._events() if e['method'] == 'Network.requestWillBeSent']
        return [url for url in sent[1:] if not url.startswith('data:')]

    def screenshot(self):
        """The PNG of what the window shows."""
        return base64.b64decode(self.call('Page.captureScreenshot')['data'])

    def pdf(self):
        """The page as it is printed."""
        return base64.b64decode(self.call('Page.printToPDF')['data'])

    def _events(self):
        return [event for event in self._browser.events if event.get('sessionId') == self._session]
