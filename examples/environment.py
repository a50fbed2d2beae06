"""An environment of several turns: the model guesses a number from hints."""

from relax_hpc.environments.base import Environment, Observation, Step


class Guess(Environment):
    """A number from 1 to 99. Each wrong guess is answered with a hint."""

    def reset(self, beginning):
        self.number = int(beginning.answer)
        return (Observation("Which number from 1 to 99 is it?", role="user"),)

    def step(self, response):
        guess = response.text.strip()
        if guess == str(self.number):
            return Step(done=True, info={"turns": response.turn + 1}, reward=1.0)
        is_higher = not guess.isdigit() or int(guess) < self.number
        hint = "It is higher." if is_higher else "It is lower."
        return Step((Observation(hint, role="user"),), reward=0.0)
