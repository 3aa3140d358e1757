"""What makes a server's output not its model's own is said wherever figures are made of it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from live_server import live_server
from tiny_models import edit_config, tiny_llama

from foredraft import LLM
from foredraft.bench.serving.client import ServedModel, ServingClient
from foredraft.cli.app import main

MARKS = ("random weights", "acceptance by chance: synthetic 0.5")


def test_random_weights_and_chance_are_told_to_clients_and_stand_above_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tiny_llama(tmp_path, num_modules=2)
    for file in path.iterdir():
        if file.name != "config.json":
            file.unlink()
    edit_config(path, num_mtp_layers=2)

    def load() -> LLM:
        return LLM(path, load_format="dummy", synthetic_acceptance="0.5", num_blocks=64, device="cpu")

    async def served(url: str) -> ServedModel:
        async with ServingClient(url) as client:
            return await client.served_model()

    with live_server(load) as live:
        assert asyncio.run(served(live.url)) == ServedModel("model", MARKS)
        options = ["--dataset", "random", "--input-len", "3", "--output-len", "4", "--vocab-size", "32"]
        with pytest.raises(SystemExit) as ended:
            main(["bench", "serve", "--base-url", live.url, "--num-prompts", "2", *options])
        assert ended.value.code == 0
    printed = capsys.readouterr().out
    for mark in MARKS:
        assert f"NOT the model's own output: {mark}" in printed
