"""Other people's trainers over prorl's stream, one file each, importing the trainer only inside."""
