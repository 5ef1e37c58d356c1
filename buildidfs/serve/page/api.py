# SPDX-License-Identifier: Apache-2.0
"""The JSON API of the page, and its OpenAPI 3.1 description, made from the values themselves."""

from __future__ import annotations

import functools
from typing import Any, Final, NamedTuple

import msgspec

from buildidfs import __version__, answers, names

_encode = msgspec.json.Encoder().encode


class Route(NamedTuple):
    """A path of the API, the type of its answer, and its parameters with examples."""

    path: str
    summary: str
    answer: type
    parameters: tuple[tuple[str, str, str], ...] = ()
    absent: type | None = None
    method: str = "get"


_ID: Final = ("id", "path", "The build ID in hexadecimal digits, in full")

ROUTES: Final = (
    Route("/api/overview", "Coverage, what is missing, growth and health", answers.Overview),
    Route(
        "/api/id/{id}",
        "All that every user may know of a build ID",
        answers.BuildIdPage,
        (_ID,),
        answers.NotServed,
    ),
    Route(
        "/api/search",
        "Files and containers by ID, path, file name, container or symbol",
        answers.Found,
        (
            ("q", "query", "The text to look for"),
            ("symbols", "query", "1 to look into the symbol tables of files, too"),
        ),
    ),
    Route(
        "/api/container/{name}",
        "A container and its files",
        answers.Contents,
        (("name", "path", "The name that the overview has for it, or its label"),),
        answers.Problem,
    ),
    Route(
        "/api/compare/{id}/{left}/{right}",
        "What differs between two files with the same build ID",
        answers.Compared,
        (
            _ID,
            ("left", "path", "The SHA-256 of one file"),
            ("right", "path", "The SHA-256 of the other"),
        ),
        answers.NotServed,
    ),
    Route(
        "/api/drop",
        "The coverage of an uploaded profile, core file or binary, where the server allows it",
        answers.Dropped,
        absent=answers.Problem,
        method="post",
    ),
)


def encode(value: msgspec.Struct) -> bytes:
    """Return an answer as JSON without characters that a terminal interprets."""
    return names.json_escaped(_encode(value)) + b"\n"


@functools.cache
def description() -> bytes:
    """Return the description of the API."""
    types = [each for route in ROUTES for each in (route.answer, route.absent) if each]
    schemas, components = msgspec.json.schema_components(
        [*types, answers.Problem], ref_template="#/components/schemas/{name}"
    )
    refs = dict(zip([*types, answers.Problem], schemas, strict=True))
    return _encode(
        {
            "openapi": "3.1.0",
            "info": {
                "title": "buildidfs",
                "version": __version__,
                "summary": "What a store holds and lacks, as every user may know it",
                "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
            },
            "paths": {route.path: {route.method: _operation(route, refs)} for route in ROUTES},
            "components": {"schemas": components},
        }
    )


def _operation(route: Route, refs: dict[type, dict[str, Any]]) -> dict[str, Any]:
    def content(answer: type) -> dict[str, Any]:
        return {"application/json": {"schema": refs[answer]}}

    responses = {"200": {"description": route.summary, "content": content(route.answer)}}
    if route.absent is not None:
        responses["404"] = {
            "description": "Nothing is held that every user may read",
            "content": content(route.absent),
        }
    problem = content(answers.Problem)
    responses["400"] = {"description": "The request means nothing", "content": problem}
    responses["503"] = {"description": "The store cannot be read now", "content": problem}
    operation = {
        "summary": route.summary,
        "operationId": route.answer.__name__,
        "parameters": [
            {
                "name": name,
                "in": where,
                "required": where == "path",
                "description": text,
                "schema": {"type": "string"},
            }
            for name, where, text in route.parameters
        ],
        "responses": responses,
    }
    if route.method == "post":
        upload = {"type": "string", "contentMediaType": "application/octet-stream"}
        operation["requestBody"] = {
            "required": True,
            "content": {"application/octet-stream": {"schema": upload}},
        }
    return operation
