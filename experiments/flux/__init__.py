"""A rectified-flow transformer of images, trained by titan's trainer."""
