"""Score texts: reads lines of {"index", "seed", "data"}, and writes a line with the same index for each."""

import argparse
import json

parser = argparse.ArgumentParser()
parser.add_argument("--in", dest="source", required=True)
parser.add_argument("--out", required=True)
arguments = parser.parse_args()

with open(arguments.source, encoding="utf-8") as source, open(arguments.out, "w", encoding="utf-8") as out:
    for line in source:
        item = json.loads(line)
        n_words = len(item["data"]["text"].split())
        row = {"index": item["index"], "score": float(n_words), "label": "long" if n_words > 3 else "short"}
        print(json.dumps(row), file=out)
