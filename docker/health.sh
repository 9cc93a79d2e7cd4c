#!/usr/bin/env bash
# Exit with 0 if the service of this container answers.
exec /opt/trainer/bin/python -c "
import urllib.request
urllib.request.urlopen('http://127.0.0.1:8000/healthz', timeout=5)
"
