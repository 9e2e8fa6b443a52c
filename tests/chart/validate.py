"""Validates objects of Kubernetes strictly against the schemas of a version, in the environment of `make test-chart`.

`python validate.py VERSION < LINES`: one JSON object per line. Prints a line for each that is wrong.
"""

import json
import sys

import kubernetes_validate


def main() -> int:
    """Return 1 if any object is wrong."""
    wrong = 0
    for line in sys.stdin:
        given = json.loads(line)
        try:
            kubernetes_validate.validate(given, sys.argv[1], strict=True)
        except (kubernetes_validate.ValidationError, kubernetes_validate.SchemaNotFoundError) as error:
            wrong += 1
            print(f"{given['kind']} {given['metadata']['name']}: {type(error).__name__}: {error}")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
