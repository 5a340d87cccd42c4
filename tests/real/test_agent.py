"""An agent chooses a plan by five calls, through the official SDK's client and a server on stdin and stdout."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import environment_of

pytestmark = pytest.mark.real

AGENT = """
import asyncio, json, os, sys
from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client

async def main():
    server = StdioServerParameters(command=sys.executable, args=["-m", "parsim", "mcp"], env=dict(os.environ))
    async with stdio_client(server) as (read, write), ClientSession(read, write) as session:
        await session.initialize()
        tools = {tool.name: sorted(tool.input_schema["properties"]) for tool in (await session.list_tools()).tools}
        async def call(tool, **arguments):
            found = await session.call_tool(tool, arguments)
            text = found.content[0].text
            return {"error": text} if found.is_error else json.loads(text)
        asked = {"model": "llama3-8b", "settings": {"training.precision": "bf16", "model.args.seq": 4096}}
        wrong = await call("plan", **asked, cluster="8xh100-smx", global_batch=64)
        small = await call("check", **asked, cluster="2xa100-sxm-40gb", global_batch=64)
        over = {"cluster.profile": ["8xa100-sxm-80gb", "8xh100-sxm"]}
        swept = await call("sweep", **asked, over=over, global_batch=64, goal="min step")
        best = swept["best"]["cluster.profile"]
        chosen = await call("plan", **asked, cluster=best, global_batch=64)
        why = await call("explain", **asked, cluster=best, global_batch=64)
        code = await call("plan", model="os:getcwd", cluster=best, global_batch=64)
    found = {"tools": tools, "wrong": wrong, "small": small, "swept": swept, "best": best, "chosen": chosen, "why": why}
    print(json.dumps({**found, "code": code}))

asyncio.run(main())
"""


def test_five_calls_choose_a_plan(installed: Callable[..., Path], tmp_path: Path) -> None:
    """mcp 2: a typing error is answered with what was meant; two GPUs are too few; of two clusters the faster is planned."""
    script = tmp_path / "agent.py"
    script.write_text(AGENT, encoding="utf-8")
    python = installed("mcp==2.3.0")
    done = subprocess.run([python, script], cwd=tmp_path, env=environment_of(tmp_path), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert set(found["tools"]) == {"plan", "check", "explain", "sweep"}
    assert "h100-sxm" in found["wrong"]["error"]
    assert found["small"]["verdict"] == "does not fit"
    assert found["small"]["needed_bytes"] > found["small"]["limit_bytes"]
    points = {point["cluster.profile"]: point["step_s"] for point in found["swept"]["points"]}
    assert found["best"] == min(points, key=points.get) == "8xh100-sxm"  # type: ignore[arg-type]
    assert found["chosen"]["fits"]
    assert found["chosen"]["step_s"]["median"] == pytest.approx(points["8xh100-sxm"])
    assert found["chosen"]["plan"] == found["why"]["plan"]
    assert found["why"]["text"].startswith("Where the ")
    assert "names code, which an agent may not run" in found["code"]["error"]
