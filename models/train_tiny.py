# SPDX-License-Identifier: Apache-2.0
"""Trains the tiny target and its draft heads on the standard library's sources; evaluates them.

    python models/train_tiny.py target --out DIR

then ``eagle3``, ``eagle`` and ``eval``, each of which reads what is in DIR. Every training command
is limited by ``--steps`` and by ``--minutes``, whichever ends first: the learning rate follows the
larger of the two fractions, so a run cut by time still ends annealed. A checkpoint is kept in
``--work`` (default DIR/work); a command that finds one there goes on from it. DIR holds target/,
eagle3/, eagle/ (config.json, model.safetensors in bfloat16, the tokenizer beside the target),
curve_*.json and eval.json.
"""

import argparse
import json
import math
import os
import time

import nets
import simulate
import textdata
import torch
import torch.nn.functional as F

DEFAULTS = {  # steps, minutes, batch, length, learning rate
    "target": (12000, 5.0, 64, 1024, 2e-3),
    "eagle3": (5000, 2.5, 64, 512, 1.5e-3),
    "eagle": (3000, 1.5, 64, 512, 1.5e-3),
}
UNROLL = 5  # draft steps in training: the first reads target states, the others the head's own
DECAY = 0.9  # weight of each further draft step
SHAPES = {"chain 3-1-4": (3, 1, 4), "tree 3-4-16": (3, 4, 16)}


class Run:
    """Optimizer, schedule, loss curve and checkpoint of one training command."""

    def __init__(self, args, name, module):
        self.args, self.name, self.module = args, name, module
        matrices = [p for p in module.parameters() if p.dim() == 2]
        others = [p for p in module.parameters() if p.dim() != 2]
        groups = [
            {"params": matrices, "weight_decay": args.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        fused = args.device.startswith("cuda")
        self.opt = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=fused)
        self.step, self.before, self.curve = 0, 0.0, []
        self.begin = self.saved = time.monotonic()
        work = args.work or os.path.join(args.out, "work")
        os.makedirs(work, exist_ok=True)
        self.file = os.path.join(work, f"{name}.pt")
        if os.path.exists(self.file):
            state = torch.load(self.file, map_location=args.device, weights_only=True)
            module.load_state_dict(state["module"])
            self.opt.load_state_dict(state["opt"])
            self.step, self.before, self.curve = state["step"], state["elapsed"], state["curve"]
            print(f"{name}: goes on from step {self.step}", flush=True)

    def elapsed(self):
        """Seconds of training, those before a restart included."""
        return self.before + time.monotonic() - self.begin

    def progress(self):
        """Fraction that is done: of the steps or of the time, the larger."""
        limit = self.elapsed() / (60 * self.args.minutes)
        return max(self.step / self.args.steps, limit)

    def steps(self):
        """Yields step numbers; sets the learning rate: warm-up, then a cosine to 2 %."""
        while (done := self.progress()) < 1:
            rate = 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done))
            rate *= min(1.0, (self.step + 1) / 200)
            for group in self.opt.param_groups:
                group["lr"] = self.args.lr * rate
            yield self.step
            self.step += 1
            if time.monotonic() - self.saved > 60:
                self.checkpoint()

    def update(self, loss):
        """One optimizer step."""
        self.opt.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
        self.opt.step()

    def log(self, **values):
        """Adds a point to the curve."""
        entry = {"step": self.step, "seconds": round(self.elapsed(), 1)}
        entry.update({k: round(float(v.detach()), 4) for k, v in values.items()})
        self.curve.append(entry)
        print(self.name, entry, flush=True)

    def checkpoint(self):
        """Keeps the state from which the command can go on."""
        state = {
            "module": self.module.state_dict(),
            "opt": self.opt.state_dict(),
            "step": self.step,
        }
        torch.save(dict(state, elapsed=self.elapsed(), curve=self.curve), self.file + ".part")
        os.replace(self.file + ".part", self.file)
        self.saved = time.monotonic()

    def finish(self):
        """Writes the weights and the curve."""
        self.checkpoint()
        nets.save(self.module, os.path.join(self.args.out, self.name))
        with open(os.path.join(self.args.out, f"curve_{self.name}.json"), "w") as f:
            json.dump({"settings": settings(self.args), "curve": self.curve}, f, indent=1)
            f.write("\n")


def settings(args):
    """The arguments that decide the result."""
    names = ("steps", "minutes", "batch", "length", "lr", "weight_decay", "seed")
    return {n: getattr(args, n) for n in names}


def autocast(args):
    """bfloat16 matrix products on a GPU, float32 on a CPU."""
    return torch.autocast(args.device.split(":")[0], torch.bfloat16, args.device != "cpu")


def data(args):
    """Both streams on the device."""
    train, held = textdata.streams(args.text)
    print(f"text: {len(train)} training tokens, {len(held)} held out", flush=True)
    return train.to(args.device), held.to(args.device)


def train_target(args):
    """Next-byte training; writes target/ with its tokenizer."""
    train, held = data(args)
    target = nets.Target().to(args.device)
    print(f"target: {sum(p.numel() for p in target.parameters())} parameters", flush=True)
    run = Run(args, "target", target)
    check = textdata.windows(held, args.check, args.length + 1, 1)

    def loss_of(ids):
        with autocast(args):
            logits = target(ids[:, :-1])[0]
        return F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())

    def log(loss):
        target.eval()
        with torch.no_grad():
            parts = [loss_of(c) for c in check.split(args.batch)]
        target.train()
        run.log(train=loss, held_out=sum(parts) / len(parts))

    loss = torch.tensor(float("nan"))
    target.train()
    for step in run.steps():
        ids = textdata.windows(train, args.batch, args.length + 1, args.seed * 10**7 + step)
        loss = loss_of(ids)
        run.update(loss)
        if step % args.log_every == 0:
            log(loss)
    log(loss)
    run.finish()
    textdata.write_tokenizer(os.path.join(args.out, "target"))


def unroll(target, head, ids, length):
    """Training-time test. ids [B, length + UNROLL]; yields draft and target logits a step.

    Step 0 is the head's prefill: row p reads (target states of p, token p + 1). In step i a row
    reads its own hidden state of step i - 1 and token p + 1 + i at position p + i; it attends to
    the rows of step 0 up to p and to its own rows of the steps between, as in chain drafting.
    """
    with torch.no_grad():
        wanted, aux, last = target(ids)
    aux, last = aux[:, :length], last[:, :length]
    hidden, past = head.start(aux, last), None
    at = torch.arange(length, device=ids.device)
    causal, own = at.unsqueeze(1) >= at, at.unsqueeze(1) == at
    for i in range(UNROLL):
        mask = torch.cat((causal, own.repeat(1, i)), 1)
        tokens = ids[:, 1 + i : 1 + i + length]
        logits, hidden, past = head(target, hidden, tokens, at + i, mask, past)
        yield logits, wanted[:, 1 + i : 1 + i + length]


def train_head(args):
    """Trains a head for the target in DIR, which stays as it is."""
    train, held = data(args)
    target = nets.load(os.path.join(args.out, "target"), args.device)
    head = nets.KINDS[args.command]().to(args.device)
    print(f"{args.command}: {sum(p.numel() for p in head.parameters())} parameters", flush=True)
    run = Run(args, args.command, head)
    check = textdata.windows(held, args.check, args.length + UNROLL, 1)
    weights = [DECAY**i for i in range(UNROLL)]

    def losses(ids):
        """Each step's cross entropy with the target's distribution, and how often both agree."""
        out, same = [], []
        with autocast(args):
            for logits, wanted in unroll(target, head, ids, args.length):
                p = wanted.float().softmax(-1)
                out.append(-(p * logits.float().log_softmax(-1)).sum(-1).mean())
                same.append((logits.argmax(-1) == wanted.argmax(-1)).float().mean())
        return out, same

    def log(loss):
        with torch.no_grad():
            out, same = losses(check)
        names = {f"same_{i}": s for i, s in enumerate(same)}
        run.log(train=loss, held_out=mix(out), **names)

    def mix(parts):
        return sum(w * x for w, x in zip(weights, parts, strict=True)) / sum(weights)

    loss = torch.tensor(float("nan"))
    for step in run.steps():
        ids = textdata.windows(
            train, args.batch, args.length + UNROLL, args.seed * 10**7 + 5 * 10**6 + step
        )
        loss = mix(losses(ids)[0])
        run.update(loss)
        if step % args.log_every == 0:
            log(loss)
    log(loss)
    run.finish()


def evaluate(args):
    """Held-out acceptance: one teacher-forced round a window, generation at two temperatures."""
    _, held = data(args)
    target = nets.load(os.path.join(args.out, "target"), args.device)
    prompt, count = 64, args.count
    seqs = textdata.windows(held, args.windows, args.context, 11).tolist()
    starts = textdata.windows(held, args.prompts, prompt + count, 12).tolist()
    prompts, real = [s[:prompt] for s in starts], [s[prompt:] for s in starts]
    result = {n: getattr(args, n) for n in ("context", "windows", "prompts", "count", "seed")}
    result["distinct_4grams_of_real_text"] = round(simulate.distinct(real), 4)
    for kind in ("eagle3", "eagle"):
        folder = os.path.join(args.out, kind)
        if not os.path.exists(folder):
            continue
        head = nets.load(folder, args.device)
        for name, shape in SHAPES.items():
            forced = [0] * (shape[0] + 1)
            for at in range(0, len(seqs), 256):
                for path in simulate.one_round(target, head, seqs[at : at + 256], shape):
                    forced[len(path) - 1] += 1
            entry = {
                "teacher_forced": round(simulate.accept_length([forced]), 4),
                "histogram": forced,
            }
            for t in (0.8, 0):
                new, hist = simulate.generate(target, head, prompts, shape, count, t, args.seed)
                total = [sum(column) for column in zip(*hist, strict=True)]
                entry[f"generation_{t}"] = {
                    "accept_length": round(simulate.accept_length(hist), 4),
                    "distinct_4grams": round(simulate.distinct(new), 4),
                    "histogram": total,
                }
            result[f"{kind} {name}"] = entry
            print(kind, name, json.dumps(entry), flush=True)
            if name == "chain 3-1-4" and kind == "eagle3":
                t, _ = simulate.generate(target, head, prompts[:2], shape, count, 0.8, args.seed)
                for p, new in zip(prompts[:2], t, strict=True):
                    text = bytes(x for x in p + new if x < 256).decode("utf-8", "replace")
                    print("--- sample\n" + text + "\n---", flush=True)
    print("real text: distinct 4-grams", result["distinct_4grams_of_real_text"])
    for name, entry in result.items():
        if isinstance(entry, dict):  # a row of the model card's table
            cells = [*name.split(" ", 1), f"{entry['teacher_forced']:.2f}"]
            for t in (0.8, 0):
                g = entry[f"generation_{t}"]
                cells += [f"{g['accept_length']:.2f}", f"{g['distinct_4grams']:.2f}"]
            print("| " + " | ".join(cells) + " |")
    with open(os.path.join(args.out, "eval.json"), "w") as f:
        json.dump(result, f, indent=1)
        f.write("\n")


def main():
    """Reads the command line and runs one command."""
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("command", choices=("target", "eagle3", "eagle", "eval"))
    p.add_argument("--out", required=True)
    p.add_argument("--work", help="folder of the checkpoints")
    p.add_argument("--text", help="folder of Python sources; default: the standard library")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--seed", type=int, default=1)
    for name, kind in (("steps", int), ("minutes", float), ("batch", int), ("length", int)):
        p.add_argument(f"--{name}", type=kind)
    p.add_argument("--lr", type=float)
    p.add_argument("--weight-decay", type=float, default=0.1)
    p.add_argument("--log-every", type=int, default=250)
    p.add_argument("--check", type=int, default=64, help="held-out windows behind each log line")
    p.add_argument("--windows", type=int, default=4096, help="eval: teacher-forced windows")
    p.add_argument("--context", type=int, default=256, help="eval: tokens of such a window")
    p.add_argument("--prompts", type=int, default=64, help="eval: prompts of generation")
    p.add_argument("--count", type=int, default=256, help="eval: new tokens of a prompt")
    args = p.parse_args()
    names = ("steps", "minutes", "batch", "length", "lr")
    for name, value in zip(names, DEFAULTS.get(args.command, ()), strict=False):
        if getattr(args, name) is None:
            setattr(args, name, value)
    torch.manual_seed(args.seed)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    if args.command == "eval":
        evaluate(args)
    elif args.command == "target":
        train_target(args)
    else:
        train_head(args)


if __name__ == "__main__":
    main()
