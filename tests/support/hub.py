"""A stand-in for the Hugging Face hub: repositories are created, get files, and are downloaded again."""

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """Serves on a port of its own within `with`.

    Attributes:
        repositories: name -> path -> content.
        private: names of the repositories that were created as private.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.private: set[str] = set()
        self.objects: dict[str, bytes] = {}
        hub = self

        class Handler(_Handler):
            server_hub = hub

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self) -> "Hub":
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.server.shutdown()
        self.server.server_close()


class _Handler(BaseHTTPRequestHandler):
    """The parts of the hub's interface that uploading and downloading a repository need."""

    server_hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *words: object) -> None:
        """Nothing."""

    def answer(self, value: object = None, status: int = 200, content: bytes | None = None, **headers: str) -> None:
        body = json.dumps(value).encode() if content is None else content
        self.send_response(status)
        for name, text in {"Content-Length": str(len(body)), "X-Repo-Commit": COMMIT, **headers}.items():
            self.send_header(name.replace("_", "-"), text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def do_POST(self) -> None:
        hub, body = self.server_hub, self.body()
        if self.path == "/api/repos/create":
            asked = json.loads(body)
            name = "/".join(part for part in (asked.get("organization"), asked["name"]) if part)
            hub.repositories.setdefault(name, {})
            if asked.get("private") or asked.get("visibility") == "private":
                hub.private.add(name)
            return self.answer({"url": f"{hub.url}/{name}", "name": name, "id": name})
        if self.path == "/api/validate-yaml":  # the head of the model card
            return self.answer({"errors": [], "warnings": []})
        if match := re.fullmatch(r"/api/models/(.+)/preupload/main", self.path.split("?")[0]):
            files = json.loads(body)["files"]
            modes = [
                {"path": file["path"], "uploadMode": "lfs" if file["size"] > 5000 else "regular"} for file in files
            ]
            return self.answer({"files": [{**mode, "shouldIgnore": False} for mode in modes]})
        if self.path.endswith("/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            actions = [
                {**item, "actions": {"upload": {"href": f"{hub.url}/objects/{item['oid']}"}}} for item in objects
            ]
            return self.answer({"transfer": "basic", "objects": actions})
        if match := re.fullmatch(r"/api/models/(.+)/commit/main", self.path.split("?")[0]):
            repository = hub.repositories[match[1]]
            for line in body.decode().splitlines():
                entry = json.loads(line)
                value = entry["value"]
                if entry["key"] == "file":
                    repository[value["path"]] = base64.b64decode(value["content"])
                if entry["key"] == "lfsFile":
                    repository[value["path"]] = hub.objects[value["oid"]]
            address = f"{hub.url}/{match[1]}/commit/{COMMIT}"
            return self.answer({"success": True, "commitOid": COMMIT, "commitUrl": address, "hookOutput": ""})
        return self.answer({"error": f"no {self.path}"}, 404)

    def do_PUT(self) -> None:
        body = self.body()
        assert hashlib.sha256(body).hexdigest() == self.path.rpartition("/")[2]
        self.server_hub.objects[self.path.rpartition("/")[2]] = body
        self.answer({})

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub = self.server_hub
        if self.path.startswith("/api/whoami"):
            return self.answer({"name": "somebody", "type": "user", "orgs": []})
        path = self.path.split("?")[0]
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(/revision/\w+)?", path):
            files = [{"rfilename": name} for name in hub.repositories.get(match[1], {})]
            if match[1] not in hub.repositories:
                return self.answer({"error": "Repository not found"}, 404, X_Error_Code="RepoNotFound")
            return self.answer({"id": match[1], "sha": COMMIT, "siblings": files, "private": False, "tags": []})
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/\w+", path):
            files = hub.repositories[match[1]].items()
            entries = [(name, len(content), hashlib.sha1(content).hexdigest()) for name, content in files]
            return self.answer(
                [{"type": "file", "path": name, "size": size, "oid": oid} for name, size, oid in entries]
            )
        if match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/\w+/(.+)", path):
            content = hub.repositories[match[1]][match[2]]
            return self.answer(content=content, ETag=f'"{hashlib.sha256(content).hexdigest()}"')
        return self.answer({"error": f"no {path}"}, 404)
