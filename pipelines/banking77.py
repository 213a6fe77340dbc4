"""A customer's message to a bank: think, then choose one of 77 intents (Banking77, by PolyAI).

The single-module task of the mmGRPO paper: with one module, mmGRPO is GRPO. The reward is exact match.
"""

import csv
import hashlib
from pathlib import Path
from typing import Literal

import dspy

from twofold.errors import PipelineError

DATA = Path("data/banking77")
HUB = "PolyAI/banking77"
TRAIN, DEV, TEST = 250, 250, 500
"""Messages of each split; train and test as in the paper, and dev, like train, from the training file."""

INTENTS = tuple(
    "activate_my_card age_limit apple_pay_or_google_pay atm_support automatic_top_up "
    "balance_not_updated_after_bank_transfer balance_not_updated_after_cheque_or_cash_deposit beneficiary_not_allowed "
    "cancel_transfer card_about_to_expire card_acceptance card_arrival card_delivery_estimate card_linking "
    "card_not_working card_payment_fee_charged card_payment_not_recognised card_payment_wrong_exchange_rate "
    "card_swallowed cash_withdrawal_charge cash_withdrawal_not_recognised change_pin compromised_card "
    "contactless_not_working country_support declined_card_payment declined_cash_withdrawal declined_transfer "
    "direct_debit_payment_not_recognised disposable_card_limits edit_personal_details exchange_charge exchange_rate "
    "exchange_via_app extra_charge_on_statement failed_transfer fiat_currency_support get_disposable_virtual_card "
    "get_physical_card getting_spare_card getting_virtual_card lost_or_stolen_card lost_or_stolen_phone "
    "order_physical_card passcode_forgotten pending_card_payment pending_cash_withdrawal pending_top_up "
    "pending_transfer pin_blocked receiving_money Refund_not_showing_up request_refund reverted_card_payment? "
    "supported_cards_and_currencies terminate_account top_up_by_bank_transfer_charge top_up_by_card_charge "
    "top_up_by_cash_or_cheque top_up_failed top_up_limits top_up_reverted topping_up_by_card "
    "transaction_charged_twice transfer_fee_charged transfer_into_account transfer_not_received_by_recipient "
    "transfer_timing unable_to_verify_identity verify_my_identity verify_source_of_funds verify_top_up "
    "virtual_card_not_working visa_or_mastercard why_verify_identity wrong_amount_of_cash_received "
    "wrong_exchange_rate_for_cash_withdrawal".split()
)
"""As the data set spells them."""

DEMOS = (
    ("pin_blocked", "Wrong codes lock the PIN.", "I typed the wrong code three times and now it refuses my card."),
    ("card_not_working", "The card does not work.", "My card is broken, no shop takes it."),
    ("card_arrival", "The card has not arrived.", "When will the card that I ordered be here?"),
    ("lost_or_stolen_card", "The card is stolen.", "Somebody took my wallet in the bus."),
)
"""Intent, reasoning and message, written for this program."""

Intent = Literal[*INTENTS]


class Classify(dspy.Signature):
    """Choose the intent of a customer's message to a bank."""

    text: str = dspy.InputField()
    # Named here and not in the instructions, so that optimized instructions keep them.
    category: Intent = dspy.OutputField(desc=f"one of {', '.join(INTENTS)}")


def program() -> dspy.ChainOfThought:
    """One module, with four demos that the paper's program has not: a small model needs some to answer at all."""
    classify = dspy.ChainOfThought(Classify)
    classify.predict.demos = [
        dspy.Example(text=text, reasoning=reasoning, category=category) for category, reasoning, text in DEMOS
    ]
    return classify


def metric(example: dspy.Example, prediction: dspy.Prediction, trace: object = None) -> float:
    return float(prediction.category == example.category)


def load(settings: object) -> tuple[list[dspy.Example], list[dspy.Example], list[dspy.Example]]:
    """The same messages in every run: each file in the order of its texts' sha256, from the beginning.

    Raises:
        PipelineError: there are no files and no way to fetch them, or a file holds something else.
    """
    test = _examples("test")
    known = {_plain(example.text) for example in test}
    # Six messages are in both files.
    train = [example for example in _examples("train") if _plain(example.text) not in known]
    return train[:TRAIN], train[TRAIN : TRAIN + DEV], test[:TEST]


def _examples(split: str) -> list[dspy.Example]:
    """The distinct messages of a file, shuffled by what they say and thus always alike."""
    path = DATA / f"{split}.csv"
    rows = _from_file(path) if path.is_file() else _from_hub(split)
    by_text = {_plain(row["text"]): row for row in rows}
    unknown = {row["category"] for row in by_text.values()} - set(INTENTS)
    if unknown:
        raise PipelineError(f"{path}: {', '.join(sorted(unknown)[:3])} is no intent of Banking77. {_wanted()}")
    return [
        dspy.Example(text=row["text"].strip(), category=row["category"]).with_inputs("text")
        for _, row in sorted(by_text.items(), key=lambda item: hashlib.sha256(item[0].encode()).digest())
    ]


def _from_file(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        if not {"text", "category"} <= set(reader.fieldnames or ()):
            raise PipelineError(f"{path} has the columns {reader.fieldnames}. {_wanted()}")
        return list(reader)


def _from_hub(split: str) -> list[dict[str, str]]:
    # Its import takes seconds, and who has the files needs it never.
    from datasets import load_dataset

    try:
        rows = load_dataset(HUB, split=split, revision="refs/convert/parquet")
    except Exception as error:  # Every layer below it has errors of its own.
        raise PipelineError(
            f"{DATA}/{split}.csv is missing and {HUB} cannot be fetched ({error}). {_wanted()}"
        ) from error
    names = rows.features["label"].names
    return [{"text": row["text"], "category": names[row["label"]]} for row in rows]


def _plain(text: str) -> str:
    return text.strip().casefold()


def _wanted() -> str:
    return (
        f"Put train.csv and test.csv, with the columns text and category, into {DATA}: they are {HUB} on the Hugging "
        "Face hub."
    )
