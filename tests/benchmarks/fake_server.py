"""A stand-in for SGLang's HTTP server: the answers' shapes, tokens that follow from the prompt, aborts, refusals."""

from __future__ import annotations

import json
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

aborted: set[str] = set()


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_: Any) -> None: ...

    def answer(self, status: int, body: Any) -> None:
        text = json.dumps(body).encode() if not isinstance(body, str) else body.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def do_GET(self) -> None:
        if self.path == "/metrics":
            self.answer(200, 'stepquant:slots{pid="1"} 4\nsglang:other 1\n')
        else:
            self.answer(200, {"internal_states": [{"stepquant": {"slots": 4, "nonfinite_states": 0}}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or "null")
        if self.path == "/abort_request":
            aborted.add(body["rid"])
        if self.path != "/generate":
            return self.answer(200, "")
        ids = body["input_ids"]
        several = isinstance(ids[0], list)
        prompts = ids if several else [ids]
        if any(len(p) > 2000 for p in prompts):
            return self.answer(400, {"error": {"message": "too long"}})
        if body.get("stream"):
            return self.stream(body)
        new = body["sampling_params"]["max_new_tokens"]
        found = []
        for p in prompts:
            tokens = [(sum(p) + i) % 250 for i in range(new)]
            margins = [[[-0.1, t, None], [-0.1 - len(set(p)) / 100, 0, None]] for t in tokens]
            found.append({"output_ids": tokens, "meta_info": {"output_top_logprobs": margins}})
        return self.answer(200, found if several else found[0])

    def stream(self, body: dict[str, Any]) -> None:
        self.send_response(200)
        self.end_headers()
        rid, new = body.get("rid"), body["sampling_params"]["max_new_tokens"]
        for i in range(new):
            time.sleep(0.001)
            reason = "abort" if rid in aborted else "length" if i == new - 1 else None
            event = {"output_ids": [i], "meta_info": {"finish_reason": {"type": reason} if reason else None}}
            try:
                self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
            except OSError:
                return
            if reason:
                break
        self.wfile.write(b"data: [DONE]\n\n")


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
