"""Python imports this as it starts, where `contract_tests.without_row` has put this folder on the path."""

from contract_tests.without_row import arm

arm()
