"""Prometheus on this machine: it scrapes one address, and answers PromQL."""

import pathlib
import re
import shutil
import subprocess
import tempfile
import time

import requests
import yaml

import harness
from processes import stop, write_pid
from waiting import wait_until

JOB, CLUSTER = "karpenter", "e2e"  # labels that dashboards select by
START_TIMEOUT = 30.0


class Prometheus:
    """A running Prometheus that scrapes `http://ADDRESS/metrics` and evaluates rules every `interval`, as a context manager."""

    def __init__(self, address, rules, interval="1s"):
        self.bin, self.address, self.rules, self.interval = harness.tools("prometheus"), address, rules, interval

    def __enter__(self):
        self.dir = pathlib.Path(tempfile.mkdtemp(prefix="stowage-prometheus-"))
        self.pid_file, self.log = self.dir / "pid", self.dir / "log"
        targets = [{"targets": [self.address], "labels": {"cluster": CLUSTER}}]
        scrape = {"job_name": JOB, "scrape_interval": self.interval, "scrape_timeout": self.interval, "static_configs": targets}
        config = self.dir / "prometheus.yml"
        (self.dir / "rules.yml").write_text(yaml.safe_dump(self.rules))
        config.write_text(yaml.safe_dump({"global": {"evaluation_interval": self.interval}, "rule_files": ["rules.yml"], "scrape_configs": [scrape]}))
        self.url = f"http://127.0.0.1:{harness.free_port()}"
        command = [self.bin / "prometheus", f"--config.file={config}", f"--storage.tsdb.path={self.dir / 'data'}"]
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                [*command, f"--web.listen-address={self.url.removeprefix('http://')}"], cwd=self.dir, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        write_pid(self.pid_file, self.process.pid)
        try:
            wait_until(lambda: self.query("up") == [1.0], START_TIMEOUT, "Prometheus scraping", lambda: self.log.read_text()[-2000:], every=0.2)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        stop([self.pid_file])
        self.process.wait()
        shutil.rmtree(self.dir, ignore_errors=True)

    def query(self, expression, at=None):
        """The values of an expression now, or at a time; those that are no numbers are left out, and without an answer there are none. Raises ValueError when it
        is refused."""
        try:
            answer = requests.get(f"{self.url}/api/v1/query", params={"query": expression, "time": at or time.time()}, timeout=30)
        except requests.ConnectionError:
            return []
        if answer.status_code == 503:  # it starts
            return []
        body = answer.json()
        if body["status"] != "success":
            raise ValueError(f"{expression}: {body['error']}")
        data = body["data"]
        results = [{"value": data["result"]}] if data["resultType"] == "scalar" else data["result"]
        return [value for value in (float(result["value"][1]) for result in results) if value == value]

    def alerts(self):
        """The alerting rules, as Prometheus has evaluated them."""
        groups = requests.get(f"{self.url}/api/v1/rules", params={"type": "alert"}, timeout=30).json()["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]

    def promtool(self, *arguments, text=None):
        """Runs promtool, and returns its status and output."""
        done = subprocess.run([self.bin / "promtool", *arguments], input=text, capture_output=True, text=True, timeout=60)
        return done.returncode, done.stdout + done.stderr


def expressions(file):
    """The PromQL expressions of a Grafana dashboard (JSON) or of alerting rules (YAML), with the titles of their panels or alerts. Those of variables
    are the series that the variable lists."""
    document = yaml.safe_load(pathlib.Path(file).read_text())
    found = []

    def walk(item, title):
        if isinstance(item, list):
            for each in item:
                walk(each, title)
        elif isinstance(item, dict):
            title = item.get("title") or item.get("alert") or item.get("name") or title
            for name, value in item.items():
                if name == "expr" and isinstance(value, str):
                    found.append((str(title), watched(value) if "alert" in item else value))
                elif name == "query" and isinstance(value, (str, dict)):
                    text = value if isinstance(value, str) else value.get("query", "")
                    found.extend((f"${title}", series) for series in re.findall(r"label_values\((.*),\s*\w+\)", text))
                else:
                    walk(value, title)

    walk(document, "")
    return found


# Names that dashboards have and this service does not, with the reason.
ABSENT = {
    "karpenter_workqueue_": "there are no such queues",
    "workqueue_": "there are no such queues",
    "kube_": "of kube-state-metrics",
    "node_boot_": "of node-exporter",
}


def reason_of(expression):
    """Why an expression has no data, as far as the names of its metrics say it."""
    for name in series_of(expression):
        for prefix, reason in ABSENT.items():
            if name == prefix or prefix.endswith("_") and name.startswith(prefix):
                return reason
    return "not in this run"


def rows_of(server, named):
    """For each of (title, expression): title, expression, series, and why there is none. All are evaluated at a time at which the last scrape succeeded:
    on a busy machine one takes longer than its timeout now and then, and until the next one there is no gauge."""

    def scraped():
        now = time.time()
        return server.query("up == 1", now) and now

    at, rows = wait_until(scraped, START_TIMEOUT, "a scrape"), []
    for title, expression in named:
        count = len(server.query(filled(expression), at))
        rows.append((title, expression, count, "" if count else reason_of(expression)))
    return rows


def filled(expression):
    """An expression of a dashboard with values for its variables: everything, within five minutes."""
    text = re.sub(r"\[\$__(rate_interval|interval|range)\]", "[5m]", expression)
    # Prometheus 3 writes the quantiles and buckets 0 and 1 as 0.0 and 1.0.
    text = re.sub(r'\b(quantile|le)="([01])"', r'\1=~"\2(\\\\.0)?"', text)
    text = text.replace('"$cluster"', f'"{CLUSTER}"').replace('"$controller"', '"disruption"')
    text = re.sub(r'"\$\{?\w+(:\w+)?\}?"', '".*"', text)
    return re.sub(r"\$\{?\w+\}?", "nodepool", text)


def watched(expression):
    """What an alert compares with a number."""
    return re.sub(r"\s(>|<|>=|<=|==|!=)\s*[\d.]+\s*$", "", expression)


def series_of(expression):
    """The names of the metrics in an expression."""
    names = re.findall(r"\b((?:karpenter|stowage|operator|controller_runtime|leader_election|process|kube|node|aws|workqueue|go|up)_?\w*)\s*(?=[{\[)(]|\s|$)", expression)
    return sorted(set(names))


def table(rows):
    """Rows of (title, expression, number of series, reason) as text."""
    lines = [f"{count:>5} series  {title}: {' '.join(expression.split())[:160]}{f'  ({reason})' if reason else ''}" for title, expression, count, reason in rows]
    return "\n".join(lines)
