"""Serve the deployments, until it is ended: what `make ui` starts beside the two servers.

1. Runs that a killed process left open are closed, unless something works in this checkout.
2. `retrain` is deployed with the schedule of the settings, one run at a time. When this ends, the schedule pauses; when
   it starts again, the schedule goes on.
"""

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterState, FlowRunFilterStateType
from prefect.client.schemas.objects import ConcurrencyLimitConfig, ConcurrencyLimitStrategy, StateType
from prefect.flows import EntrypointType
from prefect.states import Crashed

from flows.retrain import PARAMS, retrain
from tasks import stage
from twofold.errors import SettingsError, TwofoldError
from twofold.settings import Schedule, load

NAME = "recurring"
OPEN = [StateType.RUNNING, StateType.PENDING, StateType.PAUSED, StateType.CANCELLING]


def serve() -> None:
    """Serve `retrain` until SIGTERM."""
    schedule = load(PARAMS).retrain.schedule or Schedule.model_construct()
    with get_client(sync_client=True) as client:
        close_killed(client)
    try:
        retrain.serve(
            NAME,
            cron=schedule.cron,
            interval=schedule.interval,
            global_limit=ConcurrencyLimitConfig(limit=1, collision_strategy=ConcurrencyLimitStrategy.CANCEL_NEW),
            entrypoint_type=EntrypointType.MODULE_PATH,
            print_starting_message=False,
        )
    except ValueError as error:
        raise SettingsError(f"{PARAMS}: retrain.schedule: {error}") from error


def close_killed(client: SyncPrefectClient) -> None:
    """Mark runs as crashed whose process is gone: all that are open while nothing works in this checkout."""
    wanted = FlowRunFilter(state=FlowRunFilterState(type=FlowRunFilterStateType(any_=OPEN)))
    try:
        with stage.alone("retraining", "serve", "retrain"), stage.alone("stage", "serve", "pipeline"):
            for run in client.read_flow_runs(flow_run_filter=wanted):
                client.set_flow_run_state(run.id, Crashed(message="Its process was killed."), force=True)
    except TwofoldError as error:
        print(f"{error} Its runs stay as they are.", flush=True)


def main() -> None:
    with stage.users_errors():
        serve()


if __name__ == "__main__":
    main()
