# SPDX-License-Identifier: Apache-2.0
"""Compare JSON with a description in OpenAPI, as far as ours uses it."""

from __future__ import annotations

from typing import Any


def faults(value: Any, schema: dict[str, Any], named: dict[str, Any], at: str = "") -> list[str]:
    """The places where a value is not what its schema says, for the words that it uses."""
    if "$ref" in schema:
        return faults(value, named[schema["$ref"].rpartition("/")[2]], named, at)
    if "anyOf" in schema:
        each = [faults(value, one, named, at) for one in schema["anyOf"]]
        return [] if [] in each else each[0]
    types: dict[str, Any] = {
        "object": dict, "array": list, "string": str, "integer": int, "boolean": bool,
        "number": (int, float), "null": type(None),
    }  # fmt: skip
    if "type" in schema and not isinstance(value, types[schema["type"]]):
        return [f"{at} is {value!r}, not {schema['type']}"]
    found = []
    if isinstance(value, list):
        for number, item in enumerate(value):
            found += faults(item, schema["items"], named, f"{at}[{number}]")
    elif isinstance(value, dict) and "properties" in schema:
        required = set(schema.get("required", ()))
        found += [f"{at} lacks {name}" for name in required - value.keys()]
        found += [f"{at} has {name}" for name in value.keys() - schema["properties"].keys()]
        for name, item in value.items():
            if name in schema["properties"]:
                found += faults(item, schema["properties"][name], named, f"{at}.{name}")
    return found
