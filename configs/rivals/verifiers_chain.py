"""The tasks as a taskset of verifiers 0.4."""

import chain
import verifiers.v1 as vf


class Data(vf.TaskData):
    number: int


class Chain(vf.Task[Data]):
    @vf.reward
    async def right(self, trace) -> float:
        return chain.reward(self.data.number, trace.last_reply)


class ChainTaskset(vf.Taskset[Chain, vf.TasksetConfig]):
    def load(self):
        for number in range(100, 1000):
            prompt = chain.prompt(number)
            yield Chain(Data(prompt=prompt, system_prompt=chain.SYSTEM, number=number))


__all__ = ["ChainTaskset"]
