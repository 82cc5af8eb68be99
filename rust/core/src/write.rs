//! Planning a step: decide, then write the step's arrays in place.

use std::cell::Cell;
use std::time::Instant;

use crate::arrays::{StepArrays, flag, header};
use crate::block::BlockId;
use crate::edits::LogitEdit;
use crate::engine::{Engine, Planned, Slot};
use crate::error::StepError;
use crate::noise;
use crate::overlap::Pending;
use crate::request::Request;
use crate::table::TOGETHER;

/// Where the next item of each array goes, and what the step's requests ask for.
struct Writer<'a, 'b> {
    arrays: &'b StepArrays<'a>,
    slot: usize,
    block_size: usize,
    max_blocks: usize,
    tokens: usize,
    seqs: usize,
    samples: usize,
    max_query_len: u32,
    max_seq_len: usize,
    flags: i32,
    num_logprobs: Option<u32>,
    edits: usize,
    prompt_rows: usize,
    prompt_logprobs: usize,
    masks: usize,
}

impl Engine {
    /// Plans a step and writes its arrays. Returns the number of tokens in it; 0 if there is nothing to
    /// compute, and then no commit follows.
    ///
    /// The step before may be in flight still: then there may also be nothing to compute because all of it
    /// waits for that one's commit.
    pub fn plan(&mut self, slot: usize, arrays: &StepArrays<'_>) -> Result<u32, StepError> {
        self.expect(slot, "plan", false)?;
        arrays.check(&self.config)?;
        if !self.begin_overlap() || !self.has_work() {
            return Ok(0);
        }
        let started = Instant::now();
        self.step += 1;
        self.schedule();
        let mut state = std::mem::take(&mut self.slots[slot]);
        self.write(slot, &mut state, arrays);
        state.in_flight = state.num_tokens > 0;
        state.started = state.in_flight.then_some(started);
        state.step = self.step;
        let tokens = state.num_tokens;
        self.slots[slot] = state;
        self.start_masks(slot);
        if tokens > 0 {
            self.counters.steps += 1;
            self.counters.step_tokens.observe(tokens);
        }
        Ok(tokens)
    }

    fn write(&mut self, slot: usize, state: &mut Slot, arrays: &StepArrays<'_>) {
        state.planned.clear();
        let mut writer = Writer {
            arrays,
            slot,
            block_size: self.config.block_size as usize,
            max_blocks: self.config.max_blocks_per_seq() as usize,
            tokens: 0,
            seqs: 0,
            samples: 0,
            max_query_len: 0,
            max_seq_len: 0,
            flags: 0,
            num_logprobs: None,
            edits: 0,
            prompt_rows: 0,
            prompt_logprobs: 0,
            masks: 0,
        };
        arrays.query_start[0].set(0);
        for &Pending { index, sample } in &self.overlap.pending {
            let request = self.table.get_mut(index);
            state.planned.push(writer.pending(index, request, sample));
        }
        let (overlapped, flights) = (self.overlap.active, &self.overlap.flights);
        let drafting = self.config.max_draft_tokens > 0;
        for together in self.decoding.chunks(TOGETHER) {
            self.table.warm(together.iter().copied());
            for &index in together {
                let request = self.table.get_mut(index);
                if overlapped && flights[request.row as usize].tokens > 0 {
                    continue;
                }
                if drafting && !request.drafts.is_empty() {
                    self.counters.drafts += 1;
                    self.counters.draft_tokens += request.drafts.len() as u64;
                    state.planned.push(writer.drafted(index, request));
                } else {
                    let first_sample = writer.samples as u32;
                    writer.decode(request);
                    state.planned.push(Planned {
                        index,
                        tokens: 1,
                        samples: 1,
                        first_sample,
                    });
                }
            }
        }
        let num_decodes = writer.seqs;
        for &index in &self.grants {
            // A grant is void if its request was preempted for a more urgent one afterwards.
            let live = self.table.get_mut(index);
            if live.scheduled > 0 {
                self.counters.prefill_tokens += u64::from(live.scheduled);
                let flying = self.overlap.flights[live.row as usize].tokens;
                state.planned.push(writer.chunk(index, live, flying));
            }
        }
        writer.finish(num_decodes, self.overlap.pending.len());
        state.num_tokens = writer.tokens as u32;
        state.num_logprobs = writer.num_logprobs;
        state.num_masks = writer.masks;
    }

    /// Writes the logit edits of a planned step: which sample, which token, and the factor and bias of
    /// [`LogitEdit`]. The arrays need the room that the header asks for.
    pub fn logit_edits(
        &self,
        slot: usize,
        sample: &[Cell<i32>],
        token: &[Cell<i32>],
        repetition: &[Cell<f32>],
        bias: &[Cell<f32>],
    ) -> Result<usize, StepError> {
        self.expect(slot, "logit_edits", true)?;
        let room = sample
            .len()
            .min(token.len())
            .min(repetition.len())
            .min(bias.len());
        let mut at = 0;
        for planned in &self.slots[slot].planned {
            let request = self.table.get(planned.index);
            let Some(edits) = request.edits.as_deref().filter(|_| planned.samples > 0) else {
                continue;
            };
            let pending = self.num_pending(slot, request);
            for row in 0..planned.samples {
                // Requests with edits have no drafts: there is one row.
                for edit in edits.iter(request.output(), pending) {
                    if at == room {
                        let needed = at + 1;
                        return Err(StepError::ArrayLength {
                            name: "logit edits",
                            needed,
                            actual: room,
                        });
                    }
                    let LogitEdit {
                        token: id,
                        repetition: factor,
                        bias: shift,
                    } = edit;
                    sample[at].set((planned.first_sample + row) as i32);
                    token[at].set(id as i32);
                    repetition[at].set(factor);
                    bias[at].set(shift);
                    at += 1;
                }
            }
        }
        Ok(at)
    }
}

impl Writer<'_, '_> {
    /// One request's next token: the common case, kept short.
    #[inline]
    fn decode(&mut self, request: &mut Request) {
        let position = request.computed as usize;
        debug_assert_eq!(request.last_id, request.tokens[position]);
        debug_assert_eq!(
            request.last_block,
            request.table[position / self.block_size]
        );
        self.place(request.last_id, position, request.last_block);
        self.sequence(request, 1, position + 1);
        self.sample(request, self.tokens - 1, 0);
    }

    /// One request's next token and its drafts, each a sequence of its own.
    fn drafted(&mut self, index: u32, request: &mut Request) -> Planned {
        let position = request.computed as usize;
        let first_sample = self.samples as u32;
        for row in 0..=request.drafts.len() {
            let token = row
                .checked_sub(1)
                .map_or(request.last_id, |at| request.drafts[at]);
            self.run(&[token], position + row, request);
            self.sequence(request, 1, position + row + 1);
            self.sample(request, self.tokens - 1, row as u64);
        }
        let rows = 1 + request.drafts.len() as u32;
        Planned {
            index,
            tokens: rows,
            samples: rows,
            first_sample,
        }
    }

    /// One request's next token, which is a sample of the step before.
    fn pending(&mut self, index: u32, request: &mut Request, sample: u32) -> Planned {
        let position = request.tokens.len();
        let at = self.tokens;
        let first_sample = self.samples as u32;
        self.arrays.source[at].set(sample as i32);
        self.place(0, position, request.table[position / self.block_size]);
        self.sequence(request, 1, position + 1);
        self.sample(request, at, 1);
        Planned {
            index,
            tokens: 1,
            samples: 1,
            first_sample,
        }
    }

    /// Several tokens of a request: a prefill chunk. `flying` of its tokens are computed by the step before.
    fn chunk(&mut self, index: u32, request: &mut Request, flying: u32) -> Planned {
        let first = (request.computed + flying) as usize;
        let scheduled = request.scheduled;
        let end = first + scheduled as usize;
        self.run(&request.tokens[first..end], first, request);
        self.sequence(request, scheduled, end);
        if let Some(prompt) = &request.prompt_logprobs {
            let rows = request.prompt_rows(first as u32, scheduled).len();
            self.prompt_rows += rows;
            self.prompt_logprobs = self.prompt_logprobs.max(prompt.top_width);
        }
        let first_sample = self.samples as u32;
        // The last known token predicts one.
        let samples = u32::from(end == request.tokens.len());
        if samples > 0 {
            self.sample(request, self.tokens - 1, 0);
        }
        Planned {
            index,
            tokens: scheduled,
            samples,
            first_sample,
        }
    }

    #[inline]
    fn place(&mut self, id: u32, position: usize, block: BlockId) {
        let at = self.tokens;
        let first = block as usize * self.block_size;
        let arrays = self.arrays;
        arrays.token_ids[at].set(id as i32);
        arrays.positions[at].set(position as i32);
        arrays.slot_mapping[at].set((first + position % self.block_size) as i64);
        self.tokens += 1;
    }

    /// Consecutive tokens from position `first` on, block by block.
    fn run(&mut self, tokens: &[u32], first: usize, request: &Request) {
        let cells = self.tokens..self.tokens + tokens.len();
        for (cell, &token) in self.arrays.token_ids[cells.clone()].iter().zip(tokens) {
            cell.set(token as i32);
        }
        for (cell, position) in self.arrays.positions[cells.clone()]
            .iter()
            .zip(first as i32..)
        {
            cell.set(position);
        }
        let mut slots = &self.arrays.slot_mapping[cells];
        let mut offset = first % self.block_size;
        for &block in &request.table[first / self.block_size..] {
            let here = slots.len().min(self.block_size - offset);
            let (of_block, rest) = slots.split_at(here);
            let start = (block as usize * self.block_size + offset) as i64;
            for (cell, slot) in of_block.iter().zip(start..) {
                cell.set(slot);
            }
            if rest.is_empty() {
                break;
            }
            slots = rest;
            offset = 0;
        }
        self.tokens += tokens.len();
    }

    #[inline]
    fn sequence(&mut self, request: &mut Request, query_len: u32, seq_len: usize) {
        let at = self.seqs;
        let arrays = self.arrays;
        arrays.query_start[at + 1].set(self.tokens as i32);
        arrays.seq_lens[at].set(seq_len as i32);
        arrays.rows[at].set(request.row as i32);
        let synced = request.synced[self.slot] as usize;
        if synced < request.table.len() {
            let row = request.row as usize * self.max_blocks;
            let cells = &arrays.block_table[row + synced..row + request.table.len()];
            for (cell, &block) in cells.iter().zip(&request.table[synced..]) {
                cell.set(block as i32);
            }
            request.synced[self.slot] = request.table.len() as u32;
        }
        self.seqs += 1;
        self.max_query_len = self.max_query_len.max(query_len);
        self.max_seq_len = self.max_seq_len.max(seq_len);
    }

    #[inline]
    fn sample(&mut self, request: &Request, logits_index: usize, ahead: u64) {
        let at = self.samples;
        let arrays = self.arrays;
        let params = &request.params;
        arrays.logits_index[at].set(logits_index as i32);
        arrays.temperature[at].set(params.temperature);
        arrays.top_k[at].set(params.top_k as i32);
        arrays.top_p[at].set(params.top_p);
        arrays.min_p[at].set(params.min_p);
        if params.temperature > 0.0 {
            let position = u64::from(request.num_output()) + ahead;
            arrays.uniform[at].set(noise::uniform(params.seed, position));
            self.flags |= flag::RANDOM;
            self.flags |= if params.top_k > 0 { flag::TOP_K } else { 0 };
            self.flags |= if params.top_p < 1.0 { flag::TOP_P } else { 0 };
            self.flags |= if params.min_p > 0.0 { flag::MIN_P } else { 0 };
        } else {
            arrays.uniform[at].set(0.0);
        }
        self.num_logprobs = self.num_logprobs.max(params.num_logprobs);
        if let Some(edits) = request.edits.as_deref() {
            self.edits += edits.num_edits(request.num_output() + ahead as u32);
            self.masks += usize::from(edits.is_masked());
        }
        self.samples += 1;
    }

    fn finish(&self, num_decodes: usize, num_pending: usize) {
        let fields = [
            (header::NUM_TOKENS, self.tokens as i32),
            (header::NUM_SEQS, self.seqs as i32),
            (header::NUM_DECODES, num_decodes as i32),
            (header::NUM_SAMPLES, self.samples as i32),
            (header::MAX_QUERY_LEN, self.max_query_len as i32),
            (header::MAX_SEQ_LEN, self.max_seq_len as i32),
            (header::FLAGS, self.flags),
            (
                header::NUM_LOGPROBS,
                self.num_logprobs.map_or(-1, |k| k as i32),
            ),
            (header::NUM_EDITS, self.edits as i32),
            (header::NUM_PROMPT_ROWS, self.prompt_rows as i32),
            (header::NUM_PROMPT_LOGPROBS, self.prompt_logprobs as i32),
            (header::NUM_MASKS, self.masks as i32),
            (header::NUM_PENDING, num_pending as i32),
        ];
        for (field, value) in fields {
            self.arrays.header[field].set(value);
        }
    }
}
