//! Where messages to an engine go: straight into its inbox, or into one that a process empties on their way to
//! an engine elsewhere.

use crate::engine::Command;
use crate::inbox::Inbox;
use crate::output::Wake;
use crate::sync::Arc as HubArc;

/// The sending side. Clone it freely; any thread may use any clone.
#[derive(Clone)]
pub struct Commands {
    inbox: Inbox<Command>,
    /// Who is told, where nobody sleeps in the inbox's receiver.
    told: Option<HubArc<Wake>>,
}

impl Commands {
    /// Messages for whoever waits in the inbox's receiver.
    pub(crate) fn new(inbox: Inbox<Command>) -> Self {
        Self { inbox, told: None }
    }

    /// Messages for the one who watches `told`.
    pub(crate) fn telling(inbox: Inbox<Command>, told: HubArc<Wake>) -> Self {
        Self {
            inbox,
            told: Some(told),
        }
    }

    /// Sends a message, and hands it back when nobody is there to take it.
    pub fn push(&self, command: Command) -> Result<(), Command> {
        self.inbox.push(command)?;
        if let Some(told) = &self.told {
            told.notify();
        }
        Ok(())
    }

    /// Ends the receiver's wait without a message.
    pub fn wake(&self) {
        self.inbox.wake();
    }
}
