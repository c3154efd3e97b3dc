class HiddenStatesWorkerExtension:
    def _setup_hidden_states_capture(self, layer_ids):
        self._captured = []

    def _reset_capture(self):
        self._captured = []

    def _get_captured_states(self):
        return self._captured
