# SPDX-License-Identifier: Apache-2.0
"""Programs of the Go compiler, and what its own tools say of them."""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tests.support.clients.tools import Argument, run, tool

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_BUILD_S = 900.0

SOURCE = """\
package main

var sink uint64

//go:noinline
func hotloop(rounds uint64) {
	for i := uint64(0); i < rounds; i++ {
		sink += mixed(i)
	}
}

func mixed(i uint64) uint64 { return i*i ^ sink }

type worker[T any] struct{ value T }

//go:noinline
func (w *worker[T]) run() { hotloop(2_000_000_000) }

func main() {
	println(sink)
	(&worker[string]{}).run()
}
"""
HOT_LINE = 1 + SOURCE.splitlines().index("func hotloop(rounds uint64) {")

# Packages that the compiler comes with compiled, if it does: what needs `net` it has for cgo only.
_PACKAGES = {
    "archive/tar": "tar.NewReader", "archive/zip": "zip.NewWriter", "database/sql": "sql.Open",
    "compress/bzip2": "bzip2.NewReader", "compress/lzw": "lzw.NewReader", "debug/elf": "elf.Open",
    "debug/macho": "macho.Open", "debug/pe": "pe.Open", "encoding/gob": "gob.NewDecoder",
    "encoding/json": "json.NewEncoder", "encoding/xml": "xml.NewDecoder", "go/doc": "doc.Synopsis",
    "go/printer": "printer.Fprint", "go/types": "types.NewChecker", "html/template": "template.New",
    "image/gif": "gif.EncodeAll", "image/jpeg": "jpeg.Encode", "image/png": "png.Encode",
    "math/big": "big.NewFloat", "regexp": "regexp.Compile", "text/tabwriter": "tabwriter.NewWriter",
}  # fmt: skip


def large_source(functions: int) -> str:
    """A program of much of the standard library, and so many functions of its own."""
    lines = ["package main", "import ("]
    lines += [f'"{name}"' for name in ("fmt", "os", "reflect", *_PACKAGES)]
    lines += [")", "func main() {", "for _, each := range []any{all, "]
    lines += [f"{value}," for value in _PACKAGES.values()]
    lines += ["} {", "fmt.Println(each, reflect.TypeOf(each).Method(len(os.Args)))", "}", "}"]
    lines += ["func mixed(i uint64) uint64 {", "return i*i ^ i>>3", "}"]
    lines += ["var all = []func(uint64) uint64{", *(f"f{n}," for n in range(functions)), "}"]
    for number in range(functions):
        lines += [f"func f{number}(i uint64) uint64 {{", f"if i > {number} {{"]
        lines += [f"i = mixed(i + {number})", "}", "return i", "}"]
    return "\n".join([*lines, ""])


class Symbol(NamedTuple):
    """A function of the text, as ``go tool nm`` shows it."""

    address: int
    size: int
    name: str


class GoTools:
    """A Go compiler with a cache of its own; nothing is fetched."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self._env = {
            "GOCACHE": str(directory / "cache"),
            "GOPATH": str(directory / "path"),
            "GOENV": "off",
            "GOFLAGS": "-mod=mod",
            "GOTOOLCHAIN": "local",
            "GOPROXY": "off",
            "CGO_ENABLED": "0",
            "GOGC": "400",  # of the tools: they end before collecting is worth its time
        }

    def source(self, text: str = SOURCE) -> Path:
        """A directory with a program of one file."""
        place = self.directory / f"source-{secrets.token_hex(4)}"
        place.mkdir()
        (place / "go.mod").write_text("module example.org/hot\n\ngo 1.18\n")
        (place / "hot.go").write_text(text)
        return place

    def build(
        self,
        output: Path,
        package: Argument,
        *options: str,
        strip: bool = True,
        dwarf: bool = True,
        identified: bool = True,
        env: Mapping[str, str] | None = None,
    ) -> str:
        """Build a package, and return the build ID of the program.

        It has no ID of Go, beside which Go puts the build ID into no segment, where the kernel and
        LLVM look for it. Unless ``identified``, it has none at all. Without ``dwarf`` it still has
        symbols unless it is stripped: `functions` and `places` need no more.
        """
        build_id = secrets.token_hex(20)
        flags = "-buildid=" + (f" -B 0x{build_id}" if identified else "") + strip * " -s"
        flags += " -w" if strip or not dwarf else ""
        directory = package if isinstance(package, Path) else self.directory
        name = "." if isinstance(package, Path) else package
        argv: list[Argument] = [tool("go"), "build", "-o", output, f"-ldflags={flags}", *options]
        run([*argv, name], cwd=directory, env={**self._env, **(env or {})},
            timeout=_BUILD_S, check=True)  # fmt: skip
        return build_id

    def functions(self, program: Path) -> set[Symbol]:
        """The functions of an unstripped program.

        Names are without the mark that the linker adds for functions of assembler; the ends of the
        text and the marks of FIPS have no code.
        """
        out = run([tool("go"), "tool", "nm", "-size", program], env=self._env, check=True).out
        found = set()
        for line in out.splitlines():
            match = re.match(r"\s*([0-9a-f]+)\s+(\d+)\s+[tT]\s+(.*)$", line)
            if match and int(match[2]) and not match[3].startswith("go:textfips"):
                name = match[3].removesuffix(".abi0")
                found.add(Symbol(int(match[1], 16), int(match[2]), name))
        return found

    def places(self, program: Path, addresses: Sequence[int]) -> list[str]:
        """``file:line`` of addresses, as ``go tool addr2line`` shows them."""
        text = self.directory / "addresses"
        text.write_text("".join(f"0x{address:x}\n" for address in addresses))
        script = '"$1" tool addr2line "$2" < "$3"'
        argv: list[Argument] = [tool("sh"), "-c", script, "sh", tool("go"), program, text]
        return run(argv, env=self._env, check=True, timeout=300).out.splitlines()[1::2]


def machine() -> str:
    """The GOARCH of this machine."""
    return {"x86_64": "amd64", "aarch64": "arm64"}.get(os.uname().machine, os.uname().machine)
