"""Engine names, and what is said of a wrong one."""

import subprocess
import sys

import pytest

from echo2_mesh.errors import UsageError
from echo2_node.engines.registry import ENGINE_NAMES, check_engine_name


def test_known_names_pass_and_a_typo_names_the_nearest() -> None:
    assert [check_engine_name(name) for name in ENGINE_NAMES] == ["torch", "vllm", "fake"]
    with pytest.raises(UsageError, match="Did you mean 'vllm'"):
        check_engine_name("vlm")
    with pytest.raises(UsageError, match="Engines: torch, vllm, fake"):
        check_engine_name("onnx")


def test_the_trio_side_loads_nothing_heavy() -> None:
    """An actor daemon must stay small: torch lives in the child alone."""
    code = (
        "import sys, echo2_node.engines.process, echo2_node.engines.fake, "
        "echo2_node.engines.fingerprint\n"
        "heavy = {'torch', 'transformers', 'vllm', 'libp2p'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
