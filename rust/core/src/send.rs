//! Bytes to many sockets in one go.
#![expect(unsafe_code, reason = "std sends only on sockets that it owns")]

use std::io::{Error, ErrorKind};
use std::os::fd::RawFd;

#[cfg(target_os = "linux")]
const FLAGS: libc::c_int = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
#[cfg(not(target_os = "linux"))]
const FLAGS: libc::c_int = libc::MSG_DONTWAIT;

/// Sends what it can without waiting; how many bytes each socket has taken.
///
/// A socket that takes nothing may be full or broken. Whoever owns it finds out with its own next attempt.
pub fn send_each<'a>(batch: impl IntoIterator<Item = (RawFd, &'a [u8])>) -> Vec<usize> {
    let batch = batch.into_iter();
    batch.map(|(socket, bytes)| send(socket, bytes)).collect()
}

/// Sends one socket what it takes without waiting; how many bytes that was.
pub fn send(socket: RawFd, bytes: &[u8]) -> usize {
    loop {
        // SAFETY: the bytes are read only, and as many as there are. A descriptor that is none, or no socket, is an
        // error.
        let sent = unsafe { libc::send(socket, bytes.as_ptr().cast(), bytes.len(), FLAGS) };
        match usize::try_from(sent) {
            Ok(sent) => return sent,
            Err(_) if Error::last_os_error().kind() == ErrorKind::Interrupted => {}
            Err(_) => return 0,
        }
    }
}

#[cfg(all(test, not(loom)))]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;
    use std::io::Read;
    use std::os::fd::AsRawFd;
    use std::os::unix::net::UnixStream;

    #[test]
    fn each_gets_its_own_and_a_broken_one_stops_nobody() {
        let (mut first, near_first) = UnixStream::pair().unwrap();
        let (mut last, near_last) = UnixStream::pair().unwrap();
        let (gone, near_gone) = UnixStream::pair().unwrap();
        drop(gone);
        let batch = [
            (near_first.as_raw_fd(), b"one".as_slice()),
            (near_gone.as_raw_fd(), b"lost"),
            (-1, b"none"),
            (near_last.as_raw_fd(), b"three"),
        ];
        assert_eq!(send_each(batch), [3, 0, 0, 5]);
        drop((near_first, near_last));
        let (mut read, mut text) = (String::new(), String::new());
        first.read_to_string(&mut read).unwrap();
        last.read_to_string(&mut text).unwrap();
        assert_eq!((read.as_str(), text.as_str()), ("one", "three"));
    }

    #[test]
    fn a_full_socket_takes_a_part_then_nothing() {
        let (_far, near) = UnixStream::pair().unwrap();
        let much = vec![7; 1 << 26];
        let sent = send_each([(near.as_raw_fd(), much.as_slice())])[0];
        assert!(0 < sent && sent < much.len());
        assert_eq!(send_each([(near.as_raw_fd(), much.as_slice())]), [0]);
    }
}
