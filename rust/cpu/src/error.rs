//! What can be wrong with weights.

/// Weights that cannot be packed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PackError {
    /// A ggml type without a kernel.
    #[error("ggml type {0} has no kernel")]
    Format(u32),
    /// Rows that are not whole groups.
    #[error("rows of {columns} columns cannot be packed in groups of {group}")]
    Columns {
        /// Columns of the matrix.
        columns: usize,
        /// Elements that must lie together.
        group: usize,
    },
    /// More or fewer bytes or numbers than the shape asks for.
    #[error("a matrix of {rows} x {columns} needs {expected} {unit}, got {got}")]
    Length {
        /// Rows of the matrix.
        rows: usize,
        /// Its columns.
        columns: usize,
        /// What is counted.
        unit: &'static str,
        /// How many there should be.
        expected: usize,
        /// How many there are.
        got: usize,
    },
    /// A matrix without elements, or one whose size overflows.
    #[error("a matrix of {rows} x {columns} cannot be packed")]
    Shape {
        /// Rows of the matrix.
        rows: usize,
        /// Its columns.
        columns: usize,
    },
    /// Memory that the system does not give.
    #[error("there is no memory for weights of {bytes} bytes: {reason}")]
    Memory {
        /// How much was asked for.
        bytes: usize,
        /// What the system says.
        reason: String,
    },
    /// Weights that are not finite, which no group of codes can stand for.
    #[error("row {row} has a weight that is not finite")]
    NotFinite {
        /// The first such row.
        row: usize,
    },
}
