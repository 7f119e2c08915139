"""A proxy in front of an API server that sees every write before and after it takes effect.

`KubeProxy(kubeconfig)` listens on loopback without TLS and forwards requests with their credentials. `at(call, forwarded)` is called twice
for each write, before and after the API server handled it; if it returns true, the connection ends without a response, and a call that
is not forwarded yet never is. Watches are forwarded as they come.
"""

import base64
import http.client
import http.server
import json
import pathlib
import ssl
import threading
import urllib.parse

HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length", "host"}
CHUNK = 64 << 10


def name_of(method, path):
    """A call's name, such as `patch nodeclaims/status`."""
    parts = urllib.parse.urlsplit(path).path.strip("/").split("/")
    parts = parts[2:] if parts[0] == "api" else parts[3:]
    if len(parts) > 2 and parts[0] == "namespaces":
        parts = parts[2:]
    resource = "/".join([*parts[:1], *parts[2:]])
    return f"{'create' if method == 'POST' else method.lower()} {resource}"


class KubeProxy:
    """The proxy, as a context manager."""

    def __init__(self, kubeconfig):
        cluster = json.loads(pathlib.Path(kubeconfig).read_text())["clusters"][0]["cluster"]
        self.upstream = urllib.parse.urlsplit(cluster["server"])
        self.tls = ssl.create_default_context(cadata=base64.b64decode(cluster["certificate-authority-data"]).decode())
        self.at = lambda call, forwarded: False

    def __enter__(self):
        proxy = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def setup(self):
                super().setup()
                self.up = http.client.HTTPSConnection(proxy.upstream.hostname, proxy.upstream.port, timeout=120, context=proxy.tls)

            def finish(self):
                super().finish()
                self.up.close()

            def serve(self):
                try:
                    proxy.serve(self)
                except (OSError, http.client.HTTPException):
                    self.close_connection = True

            do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = serve

            def log_message(self, *_):
                pass

        class Server(http.server.ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 256

            def handle_error(self, *_):
                """Ignores clients that were killed."""

        self.server = Server(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()

    def kubeconfig(self, file):
        """Points a kubeconfig to this proxy."""
        config = json.loads(pathlib.Path(file).read_text())
        config["clusters"][0]["cluster"] = {"server": self.endpoint}
        pathlib.Path(file).write_text(json.dumps(config))

    def serve(self, handler):
        body = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
        call = name_of(handler.command, handler.path)
        write = handler.command != "GET"
        if write and self.at(call, False):
            handler.close_connection = True
            return
        headers = {name: value for name, value in handler.headers.items() if name.lower() not in HOP_BY_HOP}
        handler.up.request(handler.command, handler.path, body or None, headers)
        response = handler.up.getresponse()
        if write:
            content = response.read()
            if self.at(call, True):
                handler.close_connection = True
                return
        handler.send_response_only(response.status)
        for name, value in response.getheaders():
            if name.lower() not in HOP_BY_HOP:
                handler.send_header(name, value)
        if write:
            handler.send_header("Content-Length", str(len(content)))
            handler.end_headers()
            handler.wfile.write(content)
            return
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        while part := response.read1(CHUNK):
            handler.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
        # A body of known length does not end by itself: the connection would be unusable.
        response.close()
        handler.wfile.write(b"0\r\n\r\n")
