"""A TCP proxy on loopback that stops forwarding: connections stay open, and no byte passes, as when a firewall or a load balancer drops
packets silently."""

import contextlib
import socket
import threading


class TcpProxy:
    """Forwards connections to a port, as a context manager. TLS passes through."""

    def __init__(self, target):
        self.target = target
        self.flowing = threading.Event()  # of new connections
        self.flowing.set()
        self.lock = threading.Lock()
        self.pairs = []  # (event that is set while the connection flows, its sockets)

    def __enter__(self):
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self.accept, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.listener.close()
        self.flow()
        with self.lock:
            for _, sockets in self.pairs:
                for end in sockets:
                    with contextlib.suppress(OSError):
                        end.shutdown(socket.SHUT_RDWR)

    def freeze_existing(self):
        """Freezes the open connections; new ones work. Returns how many are frozen."""
        with self.lock:
            for flows, _ in self.pairs:
                flows.clear()
            return len(self.pairs)

    def freeze(self):
        """Freezes open and new connections."""
        self.flowing.clear()
        self.freeze_existing()

    def flow(self):
        """Forwards again, everything."""
        self.flowing.set()
        with self.lock:
            for flows, _ in self.pairs:
                flows.set()

    def accept(self):
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self.connect, args=(client,), daemon=True).start()

    def connect(self, client):
        self.flowing.wait()
        try:
            server = socket.create_connection(("127.0.0.1", self.target), timeout=5)
        except OSError:
            client.close()
            return
        server.settimeout(None)
        flows = threading.Event()
        flows.set()
        pair = (flows, (client, server))
        with self.lock:
            self.pairs.append(pair)
        back = threading.Thread(target=self.pump, args=(server, client, flows), daemon=True)
        back.start()
        self.pump(client, server, flows)
        back.join()
        with self.lock:
            self.pairs.remove(pair)
        client.close()
        server.close()

    @staticmethod
    def pump(source, sink, flows):
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                flows.wait()
                sink.sendall(data)
        flows.wait()
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
