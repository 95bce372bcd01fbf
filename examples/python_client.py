"""Streams from Sapwood with the generated stubs only; the package `sapwood` with no extra holds them.

    python examples/python_client.py [PROMPT]     SAPWOOD_ROUTER=host:port, default 127.0.0.1:50051

`sapwood.client` wraps the same calls in a smaller interface.
"""

import os
import sys

import grpc

from sapwood.v1 import common_pb2, router_pb2, router_pb2_grpc


def main() -> None:
    prompt = sys.argv[1] if len(sys.argv) > 1 else "The capital of France is"
    request = router_pb2.RouterGenerateRequest(
        text=prompt, sampling=common_pb2.SamplingParams(temperature=0, max_tokens=16)
    )
    with grpc.insecure_channel(os.environ.get("SAPWOOD_ROUTER", "127.0.0.1:50051")) as channel:
        stub = router_pb2_grpc.RouterStub(channel)
        for response in stub.Generate(request, timeout=60):
            print(response.text, end="", flush=True)
            if response.HasField("usage"):
                reason = common_pb2.FinishReason.Name(response.finish_reason)
                print(f"\n[{reason}, {response.usage.completion_tokens} tokens]")


if __name__ == "__main__":
    main()
