"""Ask a server of bascule for images by OpenAI's client, and follow a request by its events.

    bascule serve --model tiny --ranks 2
    python examples/serve_client.py http://127.0.0.1:8000

With a key, give it as `api_key`, and as the header "Authorization: Bearer KEY" of the events.
"""

import base64
import json
import sys
import urllib.request
from pathlib import Path
from typing import Any

from openai import OpenAI


def main(server: str) -> None:
    client = OpenAI(base_url=f"{server}/v1", api_key="none", timeout=3600)

    # Wait for two images; what OpenAI does not know goes by `extra_body`.
    settings = {"steps": 4, "seed": 7, "deadline_s": 60}
    images: Any = client.images.generate(
        prompt="a boat on a lake", n=2, size="256x256", extra_body=settings
    )
    for one in images.data:
        path = Path(f"boat-{one.seed}.png")
        path.write_bytes(base64.b64decode(one.b64_json))
        print(f"written: {path}")

    # The same without waiting: an id at once, then an event at each step.
    asked: Any = client.post("/requests", body={"prompt": "a mill", "seed": 9}, cast_to=object)
    url = f"{server}/v1/requests/{asked['data'][0]['id']}"
    with urllib.request.urlopen(f"{url}/events") as events:
        for line in filter(bytes.strip, events):
            status = json.loads(line.removeprefix(b"data: "))
            print(f"{status['state']}, step {status['step']} of {status['num_steps']}")
    with urllib.request.urlopen(f"{url}/content") as content:
        Path("mill.png").write_bytes(content.read())


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000")
