"""An agent for the colour task: it asks once, and its reward says whether the answer was right. It
starts for each episode, so it imports little."""

import http.client
import json
import os
import sys

record = json.load(sys.stdin)
host, _, path = os.environ["OPENAI_BASE_URL"].removeprefix("http://").partition("/")
asked = {"model": os.environ["OPENAI_MODEL"], "messages": record["messages"]}
connection = http.client.HTTPConnection(host)
head = {"Content-Type": "application/json"}
connection.request("POST", f"/{path}/chat/completions", json.dumps(asked), head)
answer = json.load(connection.getresponse())["choices"][0]["message"]["content"]
print(json.dumps({"reward": float(answer == record["answer"])}))
