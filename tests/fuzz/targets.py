# SPDX-License-Identifier: Apache-2.0
"""Everything that takes bytes from strangers, in one table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tests.fuzz import (
    archives,
    command_inputs,
    compound_files,
    decoders,
    elf_sections,
    jit_names,
    layers,
    other_inputs,
    own_formats,
    perf_data,
    served,
    symbol_output,
)

if TYPE_CHECKING:
    from tests.fuzz.target import Target

TARGETS: Final[dict[str, Target]] = {
    **decoders.TARGETS,
    **compound_files.TARGETS,
    **elf_sections.TARGETS,
    **perf_data.TARGETS,
    **jit_names.TARGETS,
    **command_inputs.TARGETS,
    **other_inputs.TARGETS,
    **own_formats.TARGETS,
    **served.TARGETS,
    **archives.TARGETS,
    **layers.TARGETS,
    **symbol_output.TARGETS,
}
