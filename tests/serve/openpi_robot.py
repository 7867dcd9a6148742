"""Run by the interpreter of an environment that has openpi-client: drives a server as a robot's code does.

    python openpi_robot.py PORT TOKEN OBSERVATIONS.npz ACTIONS.npz

Knows nothing of this project: only what openpi's own examples use.
"""

import sys

import numpy as np
from openpi_client import action_chunk_broker, image_tools, websocket_client_policy  # pyright: ignore


def main(port: str, token: str, source: str, target: str) -> None:
    policy = websocket_client_policy.WebsocketClientPolicy(host="127.0.0.1", port=int(port), api_key=token)
    horizon = policy.get_server_metadata()["action_horizon"]
    data = np.load(source)
    observations = [
        {
            "observation/image": image_tools.convert_to_uint8(image_tools.resize_with_pad(image, 8, 8)),
            "observation/wrist_image": wrist,
            "observation/state": state,
            "prompt": "reach the goal",
        }
        for image, wrist, state in zip(data["image"], data["wrist"], data["state"], strict=True)
    ]
    chunks, steps, versions = [], [], []
    for observation in observations:
        reply = policy.infer(observation)
        chunks.append(reply["actions"])
        versions.append(reply["version"])
        broker = action_chunk_broker.ActionChunkBroker(policy, horizon)
        steps.append(np.stack([broker.infer(observation)["actions"] for _ in range(horizon)]))
    try:
        policy.infer({**observations[-1], "observation/state": np.zeros(2)})
        error = "none"
    except RuntimeError as raised:
        error = str(raised)
    after = policy.infer(observations[-1])["actions"]
    np.savez(target, chunks=chunks, steps=steps, versions=versions, error=error, after=after)


if __name__ == "__main__":
    main(*sys.argv[1:])
