"""A front with an engine without a model, until it is killed: fake_service.py RUN PORT."""

import sys
import time
from pathlib import Path

from megatron_vlm.serve.http.app import make_app
from megatron_vlm.serve.http.http_server import FrontServer
from megatron_vlm.serve.http.request_limits import RequestLimits
from tests.support.fake_calls import FACTS, StandIn, opened

if __name__ == "__main__":
    run, port = sys.argv[1:]
    with opened(Path(run)) as journal, StandIn(journal):
        server = FrontServer(make_app(journal, RequestLimits(), None, FACTS), port=int(port))
        print("started", server.start(), flush=True)
        while True:
            time.sleep(1)
