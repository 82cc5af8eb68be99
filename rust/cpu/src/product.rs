//! The product of quantised rows and quantised weights: every panel with every tile.
#![expect(unsafe_code, reason = "tasks share tiles, and call kernels")]

use crate::activations::{Activations, TILE, Tile};
use crate::isa::Isa;
use crate::outputs::Outputs;
use crate::packed::PackedMatrix;
use crate::pool::Pool;
use crate::tile::{self, TileJob};

/// Writes all rows times the weights.
pub(crate) fn multiply(
    isa: Isa,
    pool: &Pool,
    activations: &Activations,
    matrix: &PackedMatrix,
    outputs: &Outputs<'_>,
) {
    let tiles: Vec<_> = (0..activations.tiles())
        .map(|index| activations.tile(index))
        .collect();
    let tiles = Tiles(&tiles);
    let (panels, step) = outputs.panels(pool);
    let widest = tile::kernel(isa, matrix.layout(), tiles.first_width());
    let last = tile::kernel(isa, matrix.layout(), tiles.last_width());
    pool.run(panels.div_ceil(step), &|task| {
        for panel in task * step..(task * step + step).min(panels) {
            let bytes = matrix.panel(panel).as_ptr();
            for (index, tile) in tiles.get().iter().enumerate() {
                let job = TileJob {
                    panel: bytes,
                    next: if index == 0 && panel + 1 < panels {
                        matrix.panel(panel + 1).as_ptr()
                    } else {
                        std::ptr::null()
                    },
                    groups: matrix.groups(),
                    tile: *tile,
                    output: outputs.panel(panel, index * TILE),
                };
                let kernel = if index + 1 == tiles.get().len() {
                    last
                } else {
                    widest
                };
                // SAFETY: the instructions are there; panel, tile and output have the sizes of the job.
                unsafe { kernel(&job) };
            }
        }
    });
}

/// Tiles that all tasks read.
struct Tiles<'a>(&'a [Tile]);

// SAFETY: nobody writes the activations while their tiles are in use.
unsafe impl Sync for Tiles<'_> {}

impl Tiles<'_> {
    fn get(&self) -> &[Tile] {
        self.0
    }

    fn first_width(&self) -> usize {
        self.0.first().map_or(1, |tile| tile.width)
    }

    fn last_width(&self) -> usize {
        self.0.last().map_or(1, |tile| tile.width)
    }
}
