"""A reward server with the generated stubs and grpcio alone: what a server in any other language has to do.

Run `python without_sdk.py [HOST:PORT]`.
"""

import json
import sys
from concurrent.futures import ThreadPoolExecutor

import grpc

from headrace.v1 import reward_pb2 as pb
from headrace.v1 import reward_pb2_grpc


def judge(sample: pb.RewardSample) -> pb.RewardOutcome:
    """One outcome with the sample's own id; a failure says so instead of paying 0."""
    try:
        right = sample.response_text.strip() == str(json.loads(sample.data_json)["answer"])
    except (ValueError, KeyError, TypeError) as error:
        message = f"the data of sample {sample.sample_id!r} has no answer: {error}"
        return pb.RewardOutcome(sample_id=sample.sample_id, outcome=pb.OUTCOME_ERROR, message=message)
    return pb.RewardOutcome(sample_id=sample.sample_id, outcome=pb.OUTCOME_OK, value=float(right))


class RewardService(reward_pb2_grpc.RewardServiceServicer):
    """Score alone would do; Describe says how large a batch may be."""

    def Score(self, request: pb.ScoreRequest, context: grpc.ServicerContext) -> pb.ScoreResponse:
        return pb.ScoreResponse(outcomes=[judge(sample) for sample in request.samples])

    def ScoreStream(self, request_iterator, context):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "use Score")

    def Describe(self, request: pb.DescribeRequest, context: grpc.ServicerContext) -> pb.DescribeResponse:
        return pb.DescribeResponse(name="without_sdk", max_batch=128, max_concurrency=4)


def main() -> None:
    server = grpc.server(ThreadPoolExecutor(max_workers=4))
    reward_pb2_grpc.add_RewardServiceServicer_to_server(RewardService(), server)
    address = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50052"
    port = server.add_insecure_port(address)
    server.start()
    print(f"serving without_sdk on {address.rpartition(':')[0]}:{port}", flush=True)
    server.wait_for_termination()


if __name__ == "__main__":
    main()
