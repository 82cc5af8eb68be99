//! From what is asked for to what answers can be started from.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use llguidance::Matcher;

use super::cache::GrammarCache;
use super::error::GrammarError;
use super::spec::GrammarSpec;
use super::vocabulary::Vocabulary;
use crate::text::TextModel;

/// Stack of the thread that compiles, in bytes: the library recurses along the references of a schema, of
/// which the longest text allowed can chain some ten thousand.
const STACK: usize = 64 * 1024 * 1024;

/// Compiles grammars for one model, and keeps those that it compiled last. For any thread.
pub struct GrammarCompiler {
    model: Arc<TextModel>,
    vocab_size: u32,
    eos: Vec<u32>,
    vocabulary: OnceLock<Result<Arc<Vocabulary>, GrammarError>>,
    cache: Mutex<GrammarCache>,
}

/// A grammar over the tokens of one model, ready for any number of answers.
pub struct CompiledGrammar {
    spec: GrammarSpec,
    /// At the start of the grammar; answers work on copies.
    start: Mutex<Matcher>,
    /// The tokens that may come first.
    first: Arc<[u32]>,
    vocabulary: Arc<Vocabulary>,
    bounds_digits: bool,
}

impl GrammarCompiler {
    /// A compiler for the ids of `model` below `vocab_size`, of which `eos` end an answer.
    pub fn new(model: Arc<TextModel>, vocab_size: u32, eos: Vec<u32>) -> Self {
        Self {
            model,
            vocab_size,
            eos,
            vocabulary: OnceLock::new(),
            cache: Mutex::default(),
        }
    }

    /// The grammar for what is asked for: from the cache, or compiled now, which takes milliseconds, and
    /// the first time as long as [`Vocabulary::new`].
    pub fn compile(&self, spec: &GrammarSpec) -> Result<Arc<CompiledGrammar>, GrammarError> {
        let known = self.cache().get(spec);
        if let Some(grammar) = known {
            return Ok(grammar);
        }
        let vocabulary = self
            .vocabulary
            .get_or_init(|| Vocabulary::new(&self.model, self.vocab_size, &self.eos))
            .clone()?;
        let grammar = Arc::new(compile(spec, vocabulary)?);
        self.cache().insert(spec.clone(), grammar.clone());
        Ok(grammar)
    }

    /// Whether a grammar was compiled here, so that its masks are about this model's ids.
    pub fn owns(&self, grammar: &CompiledGrammar) -> bool {
        matches!(self.vocabulary.get(), Some(Ok(own)) if Arc::ptr_eq(own, &grammar.vocabulary))
    }

    fn cache(&self) -> std::sync::MutexGuard<'_, GrammarCache> {
        // The cache is whole between its calls.
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Compiles on a thread whose stack cannot run out.
fn compile(
    spec: &GrammarSpec,
    vocabulary: Arc<Vocabulary>,
) -> Result<CompiledGrammar, GrammarError> {
    let work = || {
        let mut matcher = vocabulary
            .matcher(spec.to_grammar()?)
            .map_err(|message| GrammarError::refused(spec.source.kind(), &message))?;
        let first = mask(&mut matcher, &vocabulary)
            .map_err(|message| GrammarError::refused(spec.source.kind(), &message))?;
        Ok((matcher, first))
    };
    let (matcher, first) = std::thread::scope(|scope| {
        let thread = std::thread::Builder::new()
            .name("miniinfer-grammar".into())
            .stack_size(STACK)
            .spawn_scoped(scope, work)
            .map_err(|error| GrammarError::System {
                reason: error.to_string(),
            })?;
        let broken = |_| GrammarError::refused(spec.source.kind(), "the compiler gave up on it");
        thread.join().map_err(broken)?
    })?;
    Ok(CompiledGrammar {
        spec: spec.clone(),
        start: Mutex::new(matcher),
        first,
        bounds_digits: spec.has_json(),
        vocabulary,
    })
}

/// The tokens that may come next; those that end an answer where the grammar is complete.
pub(super) fn mask(matcher: &mut Matcher, vocabulary: &Vocabulary) -> Result<Arc<[u32]>, String> {
    let allowed = matcher
        .compute_mask_or_eos()
        .map_err(|error| error.to_string())?;
    let words = vocabulary.num_words();
    let mut mask: Arc<[u32]> = allowed.as_slice()[..words].into();
    let surplus = words as u32 * 32 - vocabulary.size();
    if surplus > 0 {
        // Just made: nobody else holds it.
        Arc::make_mut(&mut mask)[words - 1] &= u32::MAX >> surplus;
    }
    Ok(mask)
}

impl CompiledGrammar {
    /// What it was compiled from.
    pub fn spec(&self) -> &GrammarSpec {
        &self.spec
    }

    /// A matcher of its own at the start of the grammar.
    pub(super) fn matcher(&self) -> Matcher {
        self.start
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .deep_clone()
    }

    pub(super) fn first(&self) -> &Arc<[u32]> {
        &self.first
    }

    pub(super) fn vocabulary(&self) -> &Vocabulary {
        &self.vocabulary
    }

    /// Whether runs of digits are to end some time.
    pub(super) fn bounds_digits(&self) -> bool {
        self.bounds_digits
    }
}

impl std::fmt::Debug for CompiledGrammar {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("CompiledGrammar")
    }
}
