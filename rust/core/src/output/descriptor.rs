//! The file descriptor under a [`Wake`](super::wake::Wake): an eventfd on Linux, a pipe on other Unix systems, and a
//! counter with a lock in loom's model runs.

#[cfg(loom)]
pub(super) use model::Descriptor;
#[cfg(not(loom))]
pub(super) use unix::Descriptor;

#[cfg(not(loom))]
mod unix {
    #![expect(
        unsafe_code,
        reason = "std has no eventfd, no poll and no way to make a pipe non-blocking"
    )]

    use std::fs::File;
    use std::io::{self, ErrorKind, Read, Write};
    #[cfg(any(test, not(target_os = "linux")))]
    use std::os::fd::OwnedFd;
    use std::os::fd::{AsRawFd, RawFd};
    use std::time::Duration;

    /// Readable from a `raise` to the next `lower`. Neither of the two ever blocks.
    pub(in crate::output) struct Descriptor {
        reader: File,
        /// None where the one descriptor is read and written.
        writer: Option<File>,
    }

    impl Descriptor {
        #[cfg(target_os = "linux")]
        pub(in crate::output) fn new() -> io::Result<Self> {
            use std::os::fd::FromRawFd;
            // SAFETY: eventfd takes two integers and touches no memory of ours.
            let raw = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
            if raw < 0 {
                return Err(io::Error::last_os_error());
            }
            Ok(Self {
                // SAFETY: the call above made this descriptor and nobody else has it.
                reader: unsafe { File::from_raw_fd(raw) },
                writer: None,
            })
        }

        #[cfg(not(target_os = "linux"))]
        pub(in crate::output) fn new() -> io::Result<Self> {
            Self::pipe()
        }

        /// The portable form. Both ends close on exec, as all that `std` makes.
        #[cfg(any(test, not(target_os = "linux")))]
        pub(in crate::output) fn pipe() -> io::Result<Self> {
            let (reader, writer) = io::pipe()?;
            let (reader, writer) = (OwnedFd::from(reader), OwnedFd::from(writer));
            for end in [&reader, &writer] {
                // SAFETY: fcntl with these commands takes integers, and the descriptor is open.
                let failed = unsafe {
                    let flags = libc::fcntl(end.as_raw_fd(), libc::F_GETFL);
                    flags < 0
                        || libc::fcntl(end.as_raw_fd(), libc::F_SETFL, flags | libc::O_NONBLOCK) < 0
                };
                if failed {
                    return Err(io::Error::last_os_error());
                }
            }
            Ok(Self {
                reader: reader.into(),
                writer: Some(writer.into()),
            })
        }

        pub(in crate::output) fn fd(&self) -> RawFd {
            self.reader.as_raw_fd()
        }

        /// Makes the descriptor readable. Panics if someone else closed it: a reader would wait for ever.
        pub(in crate::output) fn raise(&self) {
            // Eight bytes because an eventfd takes no other number.
            let one = 1_u64.to_ne_bytes();
            loop {
                match self.writer.as_ref().unwrap_or(&self.reader).write(&one) {
                    Ok(_) => return,
                    // Full, so readable.
                    Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                    Err(error) if error.kind() == ErrorKind::Interrupted => {}
                    Err(error) => panic!("invariant: the wake descriptor stays open: {error}"),
                }
            }
        }

        /// Makes the descriptor unreadable.
        pub(in crate::output) fn lower(&self) {
            let mut buffer = [0_u8; 64];
            loop {
                match (&self.reader).read(&mut buffer) {
                    // An eventfd is emptied by one read, a pipe by one that does not fill the buffer.
                    Ok(count) if count < buffer.len() => return,
                    Ok(_) => {}
                    Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                    Err(error) if error.kind() == ErrorKind::Interrupted => {}
                    Err(error) => panic!("invariant: the wake descriptor stays open: {error}"),
                }
            }
        }

        /// Sleeps until the descriptor is readable; false at the timeout or when a signal handler ran.
        pub(in crate::output) fn wait(&self, timeout: Option<Duration>) -> io::Result<bool> {
            // Rounded up, so that a caller with a deadline does not spin through its last millisecond.
            let milliseconds = timeout.map_or(-1, |timeout| {
                i32::try_from(timeout.as_nanos().div_ceil(1_000_000)).unwrap_or(i32::MAX)
            });
            let mut poll = libc::pollfd {
                fd: self.fd(),
                events: libc::POLLIN,
                revents: 0,
            };
            // SAFETY: the pointer is to one live pollfd, as the count says.
            let ready = unsafe { libc::poll(&raw mut poll, 1, milliseconds) };
            if ready >= 0 {
                return Ok(ready > 0);
            }
            match io::Error::last_os_error() {
                error if error.kind() == ErrorKind::Interrupted => Ok(false),
                error => Err(error),
            }
        }
    }
}

#[cfg(loom)]
mod model {
    use std::io;
    use std::time::Duration;

    use crate::sync::{Condvar, Mutex};

    pub(in crate::output) struct Descriptor {
        count: Mutex<u64>,
        raised: Condvar,
    }

    impl Descriptor {
        pub(in crate::output) fn new() -> io::Result<Self> {
            Ok(Self {
                count: Mutex::new(0),
                raised: Condvar::new(),
            })
        }

        pub(in crate::output) fn fd(&self) -> i32 {
            -1
        }

        pub(in crate::output) fn raise(&self) {
            *self.count.lock().expect("invariant: not poisoned") += 1;
            self.raised.notify_all();
        }

        pub(in crate::output) fn lower(&self) {
            *self.count.lock().expect("invariant: not poisoned") = 0;
        }

        /// Without a timeout only: loom has no clock.
        pub(in crate::output) fn wait(&self, _timeout: Option<Duration>) -> io::Result<bool> {
            let mut count = self.count.lock().expect("invariant: not poisoned");
            while *count == 0 {
                count = self.raised.wait(count).expect("invariant: not poisoned");
            }
            Ok(true)
        }
    }
}
